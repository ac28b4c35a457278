"""Messages between the processes that a launcher has started as one run, in a store of torch's.

It is torchrun's own, else one that rank 0 keeps where the process group will have it.
"""

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from harness.errors import UserError
from harness.processes import leaving
from harness.processes.launcher import Launcher

SAY_SECONDS = 30.0  # of waiting, after which one is told for what
READ_SECONDS = 5.0  # for which a failed process stays so that the others learn why
POLL_SECONDS = 0.05

T = TypeVar("T")


class Messages:
    """What the processes of a run tell each other by keys, as plain values.

    Args:
        known: what the launcher has told.
        seconds: how long to wait for another process, at any moment.

    Attributes:
        round: names this start; empty once nobody listens any more.

    Raises:
        UserError: if the place of rank 0 is not known, or somebody does not come.
    """

    def __init__(self, known: Launcher, seconds: float) -> None:
        self.known, self.seconds, self.round = known, seconds, ""
        self._resolve()
        if known.rank > 0:
            self._until(self._is_answered, lambda: f"rank 0 at {self._place()}")
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = known.address
        agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            # It is kept for as long as the process group, which will find the same one.
            self.store = TCPStore(
                host,
                port,
                world_size=known.num_processes,
                is_master=known.rank == 0 and not agent_has_it,
                timeout=timedelta(seconds=max(self.seconds, SAY_SECONDS)),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            raise UserError(
                f"{socket.gethostname()} cannot meet the others at {self._place()}: "
                f"{str(error).splitlines()[0]}\n"
                "If the port is taken, set MASTER_PORT=<another> for all of them."
            ) from error
        self._arrive()

    def _arrive(self) -> None:
        """Agree on a name for this round: torchrun's store has what earlier attempts have said.

        Each process shows a number of its own, and the first one answers it.
        """
        known, store = self.known, self.store
        # Another step may take this port as well; torchruns that meet may be in two steps.
        job = known.job if known.name == "srun" else None

        def hello(rank: int) -> str:
            return f"harness/hello/{job}/{rank}"

        if known.rank > 0:
            mine = secrets.token_hex(8)
            _asked(lambda: store.set(hello(known.rank), mine))
            answer = f"harness/answer/{mine}"
            self._until(lambda: store.check([answer]), lambda: f"rank 0 at {self._place()}")
            self.round = _asked(lambda: store.get(answer)).decode()
            _asked(lambda: store.set(f"{self.round}/here/{known.rank}", ""))
            return
        self.round = f"harness/{secrets.token_hex(8)}"
        missing = set(range(1, known.num_processes))

        def is_complete() -> bool:
            for rank in list(missing):
                if store.check([hello(rank)]):
                    store.set(f"harness/answer/{store.get(hello(rank)).decode()}", self.round)
                if store.check([f"{self.round}/here/{rank}"]):
                    missing.discard(rank)
            return not missing

        self._until(is_complete, lambda: f"rank {', '.join(map(str, sorted(missing)))}")

    def _until(self, is_done: Callable[[], bool], whom: Callable[[], str]) -> None:
        """Wait for others, say so after a while, and give up after the setting's time.

        Raises:
            UserError: if they do not come.
        """
        begun, is_told = time.monotonic(), False
        while not _asked(is_done):
            seconds = time.monotonic() - begun
            if seconds > min(self.seconds, SAY_SECONDS) and not is_told:
                is_told = True
                print(
                    f"Rank {self.known.rank} on {socket.gethostname()} has waited {seconds:.0f} s "
                    f"for {whom()}.",
                    file=sys.stderr,
                    flush=True,
                )
            if seconds > self.seconds:
                raise UserError(
                    f"{whom()[0].upper()}{whom()[1:]} did not answer within join_minutes="
                    f"{self.seconds / 60:g}."
                )
            time.sleep(POLL_SECONDS)

    def _resolve(self) -> None:
        """Refuse a name of rank 0's machine that nobody knows; torch would try for minutes."""
        host, _ = self.known.address
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise UserError(
                f"{socket.gethostname()} does not know {host}, where rank 0 is: {error.strerror}.\n"
                "Add its address to /etc/hosts, or start torchrun with "
                "--local-addr=<address> on each machine, or set MASTER_ADDR=<address>."
            ) from error

    def _is_answered(self) -> bool:
        with suppress(OSError), socket.create_connection(self.known.address, timeout=1.0):
            return True
        return False

    def _place(self) -> str:
        host, port = self.known.address
        return f"{host}, port {port}"

    def set(self, key: str, value: Any) -> None:
        """Leave a message for whoever asks for it."""
        _asked(lambda: self.store.set(f"{self.round}/{key}", json.dumps(value)))

    def tell(self, key: str, value: Any) -> None:
        """Send a message to all. The first process, which may have the store, waits for them."""
        self.set(key, value)
        ranks, end = range(1, self.known.num_processes), time.monotonic() + READ_SECONDS
        while self.known.rank == 0 and time.monotonic() < end:
            if all(self.store.check([f"{self.round}/{key}/{rank}"]) for rank in ranks):
                return
            time.sleep(POLL_SECONDS)

    def hear(self, key: str) -> Any:
        """Wait for a message.

        Raises:
            UserError: what another process has failed with instead.
        """
        found: dict[str, Any] = {}

        def is_heard() -> bool:
            for name in (key, "failed"):
                if (value := self.received(name)) is not None:
                    found[name] = value
                    return True
            return False

        rank = key.partition("/")[2]
        first = (
            "rank 0, which waits for others or looks at the run" if self.known.rank else "rank 0"
        )
        self._until(is_heard, lambda: f"rank {rank}" if rank else first)
        if key in found:
            return found[key]
        if self.known.local_rank:  # the first of each machine says it
            leaving.first_has_failed.set()
        self.round = ""  # all know
        raise UserError(found["failed"])

    def received(self, key: str) -> Any:
        """A message, if it is there; ``None`` if not."""
        name = f"{self.round}/{key}"
        if not self.store.check([name]):
            return None
        value = json.loads(self.store.get(name))
        self.store.set(f"{name}/{self.known.rank}", "")
        return value


def _asked(ask: Callable[[], T]) -> T:
    try:
        return ask()
    except RuntimeError as error:  # of the store
        raise UserError("The process of rank 0 has ended.") from error
