"""Signals and ends of processes that ``strategy=ddp_spawn`` has spawned from this one."""

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from harness.errors import UserError
from harness.processes.launch import SPAWNED_BY
from harness.processes.leaving import ASKED_TO_LEAVE, leave

log = logging.getLogger(__name__)
USER_ERROR = f"{UserError.__module__}.{UserError.__qualname__}: "


@contextmanager
def answering() -> Iterator[None]:
    """Pass signals on to the spawned processes, and end as they do."""
    received: list[int] = []

    def pass_on(signum: int, _: FrameType | None) -> None:
        if signal.SIGINT in received and signum == signal.SIGINT:
            leave(128 + signum)  # kills the spawned processes as well
        received.append(signum)
        # A terminal's Ctrl-C has reached them already, and would be their second one.
        passed = signal.SIGTERM if signum == signal.SIGINT else signum
        for process in multiprocessing.active_children():
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, passed)

    # Its warning that the end of one process ends the others says nothing new.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    before: dict[int, Any] = {number: signal.signal(number, pass_on) for number in ASKED_TO_LEAVE}
    os.environ[SPAWNED_BY] = f"{os.getpid()}:"
    try:
        yield
    except ProcessExitedException as error:
        status = 128 + received[0] if received else error.exit_code
        if status > 128:
            raise SystemExit(status) from error
        log.error(
            "The process of rank %d has ended (%s).\n"
            "The same command with resume=auto goes on from the last checkpoint.",
            error.error_index,
            error.msg,
        )
        raise SystemExit(1) from error
    except ProcessRaisedException as error:
        _, is_mistake, message = str(error).rpartition(USER_ERROR)
        if is_mistake:
            raise UserError(message.strip()) from error
        raise
    finally:
        del os.environ[SPAWNED_BY]
        while before:
            signal.signal(*before.popitem())
