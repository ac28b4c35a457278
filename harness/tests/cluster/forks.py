"""Starts ``train.py`` and ``torchrun`` without their imports, as tests/faults does.

A process that has imported everything is forked; a torchrun that was started so forks its workers.
Nothing may have computed in it with several threads, which a fork lacks: OMP_NUM_THREADS=1.
"""

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests.conftest import ROOT
from tests.faults.fast_command import Forked, run_command

FAST = ("train.py", "torchrun")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Child(Forked):
    """A forked process that leads a session of its own, and has inherited no open file.

    Args:
        output: where it prints; ``None`` is where this process does.
        become: what it does; it never returns.
    """

    def __init__(self, output: Path | None, become: Callable[[], NoReturn]) -> None:
        self.returncode = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._begin(output)
                become()
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)  # whoever signals its session must find it

    def _begin(self, output: Path | None) -> None:
        os.setsid()
        gc.freeze()  # what the first process has made is not this one's to take apart
        faulthandler.disable()  # pytest's would write into a file that is closed here
        for signum in SIGNALS:
            default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            signal.signal(signum, default)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        if output is not None:
            descriptor = os.open(output, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(descriptor, 1), os.dup2(descriptor, 2)
        os.closerange(3, 65536)  # a port that another process listens to would stay open
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1)  # not pytest's
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, as ``subprocess.Popen`` has it."""
        end = time.monotonic() + (timeout or 3600.0)
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a command", timeout or 3600.0)
            time.sleep(0.005)
        return status


def is_fast(command: list[str]) -> bool:
    """Whether a command can be forked."""
    return command[0] in FAST


def fork(
    command: list[str], environment: dict[str, str], log: Path, enter: Callable[[], None]
) -> Child:
    """Start a command; ``enter`` is called before it begins."""

    def become() -> NoReturn:
        os.chdir(ROOT)
        enter()
        os.environ.clear()
        os.environ.update(environment)
        if command[0] == "train.py":
            run_command(command, environment)
        be_torchrun(command[1:])

    return Child(log, become)


def be_torchrun(arguments: list[str]) -> NoReturn:
    """Be torchrun, and end; its workers are forked."""

    def popen(
        self: Any, words: tuple[str, ...], env: dict[str, str]
    ) -> Child | subprocess.Popen[bytes]:
        if "train.py" not in words:
            return subprocess.Popen(words, env=env, start_new_session=True)
        program = list(words[words.index("train.py") :])
        return Child(None, lambda: run_command(program, env))

    subprocess_handler.SubprocessHandler._popen = popen  # type: ignore[assignment,method-assign]
    status = 1
    try:
        torchrun.main(arguments)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
