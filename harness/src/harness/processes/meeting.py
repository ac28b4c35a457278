"""Let the processes that a launcher started as one run compare themselves and share one folder.

In: a ``Launcher``. Out: what rank 0 chose, in every process. Next: the process group, which finds
the same store at the same address. The processes that a run starts by itself do not meet: their
environment carries the folder.

Keys in the store: ``round`` names this start, because torchrun's store keeps the keys of earlier
ones; ``<round>/process/<rank>`` describes a process, ``<round>/choice`` is what rank 0 chose,
``<round>/files`` a checksum of its folder, ``<round>/ready/<rank>`` is there when that process sees
the same, and ``<round>/failed`` says why all end.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from harness.errors import UserError
from harness.names import few
from harness.processes import leaving
from harness.processes.launcher import Launcher

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

POLL_SECONDS = 0.05
SHARE_SECONDS = 20.0  # after which a network disk shows to all machines what one has written
WATCH_SECONDS = 1.0
PREFIX = "harness/"


class Meeting:
    """Agreement of the processes that were started as one run; one alone agrees at once.

    As a context it tells the other processes of an error that ends this one.

    Args:
        launcher: of this process.
        minutes: how long to wait for another process, at any moment.

    Raises:
        UserError: if the address of rank 0 does not resolve, or nobody answers there.
    """

    def __init__(self, launcher: Launcher, minutes: float) -> None:
        self.launcher, self.minutes = launcher, minutes
        self.round = self.process = ""
        self.is_alone = not launcher.is_one_of_several
        if not self.is_alone:
            leaving.connected.clear()  # set by an earlier run in this process
            self.store = connect(launcher, minutes)

    def agree(
        self, fingerprint: Callable[[], Mapping[str, Any]], choose: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Stop the run where processes differ; else let rank 0 choose for all.

        Args:
            fingerprint: of code and settings: plain values by name.
            choose: what the run needs, as plain values; only rank 0 calls it.

        Raises:
            UserError: with rank, machine, and what differs.
        """
        if self.is_alone:
            return choose()
        host = socket.gethostname()
        self.process = json.dumps([host, _is_hidden(host), fingerprint()])
        if self.launcher.rank > 0:
            return dict(json.loads(self._wait("choice", "rank 0")))
        self._join(secrets.token_hex(8))
        self.store.set(f"{PREFIX}round", self.round)
        ranks = range(self.launcher.num_processes)
        check_alike([json.loads(self._wait(f"process/{rank}", f"rank {rank}")) for rank in ranks])
        choice = choose()
        self.store.set(f"{PREFIX}round", "")  # no later start joins this one
        self.store.set(self._key("choice"), json.dumps(choice))
        return choice

    def check_shared(self, folder: Path) -> None:
        """Refuse a folder that a process does not see; rank 0 waits until all have looked.

        Raises:
            UserError: with the machine that does not see it.
        """
        if self.is_alone:
            return
        if self.launcher.rank == 0:
            self.store.set(self._key("files"), _checksum(folder))
            for rank in range(1, self.launcher.num_processes):
                self._wait(f"ready/{rank}", f"rank {rank}")
            return
        checksum, end = self._wait("files", "rank 0"), time.monotonic() + SHARE_SECONDS
        while _checksum(folder) != checksum:
            if time.monotonic() > end:
                raise UserError(
                    f"{socket.gethostname()} does not see {folder}, which rank 0 has on its "
                    "machine.\nUse output_dir=<a folder on a disk that all machines share>."
                )
            time.sleep(POLL_SECONDS)
        self.store.set(self._key(f"ready/{self.launcher.rank}"), "")

    def watch(self, undo: Callable[[], None]) -> None:
        """Until all are connected, end this process where another one has failed.

        Args:
            undo: called before the end.
        """

        def look() -> None:
            while not leaving.connected.wait(WATCH_SECONDS):
                try:
                    failure = self._failure()
                except RuntimeError:  # of the store
                    failure = "The process of rank 0 has ended."
                # A process that has found the same mistake tells it itself, meanwhile.
                if failure and not leaving.connected.wait(2 * WATCH_SECONDS):
                    if not self.launcher.local_rank:
                        print(failure, file=sys.stderr, flush=True)
                    undo()
                    leaving.leave(1)

        if not self.is_alone:
            threading.Thread(target=look, name="meeting", daemon=True).start()

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(
        self, _: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_mistake = isinstance(error, Exception) and not leaving.connected.is_set()
        if self.is_alone or not is_mistake or not self.round:
            return
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if not text.startswith("Rank "):
            text = f"Rank {self.launcher.rank} on {socket.gethostname()}: {text}"
        with suppress(RuntimeError, UserError):  # the store has ended
            if not self._failure():
                self.store.set(self._key("failed"), text)
                time.sleep(WATCH_SECONDS)  # rank 0 may hold the store, and the others must read it

    def _join(self, round_: str) -> None:
        self.round = round_
        self.store.set(self._key(f"process/{self.launcher.rank}"), self.process)

    def _wait(self, key: str, who: str) -> str:
        """Return what another process writes.

        Raises:
            UserError: if it does not come, or what another process has failed with.
        """
        end = time.monotonic() + 60 * self.minutes
        try:
            while not self._has(key):
                if self.launcher.rank > 0 and self.store.check([f"{PREFIX}round"]):
                    newest = self.store.get(f"{PREFIX}round").decode()
                    if newest and newest != self.round:
                        self._join(newest)
                if failure := self._failure():
                    if self.launcher.local_rank:  # the first process of each machine says it
                        leaving.first_has_failed.set()
                    raise UserError(failure)
                if time.monotonic() > end:
                    raise UserError(f"No answer from {who} within join_minutes={self.minutes:g}.")
                time.sleep(POLL_SECONDS)
            return self.store.get(self._key(key)).decode()
        except RuntimeError as error:  # of the store
            raise UserError("The process of rank 0 has ended; its output says why.") from error

    def _failure(self) -> str:
        return self.store.get(self._key("failed")).decode() if self._has("failed") else ""

    def _has(self, key: str) -> bool:
        return bool(self.round) and self.store.check([self._key(key)])

    def _key(self, key: str) -> str:
        return f"{PREFIX}{self.round}/{key}"


def connect(launcher: Launcher, minutes: float) -> "TCPStore":
    """Open the store of all processes: torchrun's own, else one that rank 0 serves.

    Raises:
        UserError: if the machine of rank 0 has no address, or nobody answers there.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    (host, port), here = launcher.address, socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise UserError(
            f"{here} does not know {host}, where rank 0 is: {error.strerror}.\n"
            "Add its address to /etc/hosts, or start torchrun with "
            "--local-addr=<address> on each machine, or set MASTER_ADDR=<address>."
        ) from error
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            host,
            port,
            world_size=launcher.num_processes,
            is_master=launcher.rank == 0 and not has_agent,
            timeout=timedelta(minutes=minutes),
            wait_for_workers=False,
            multi_tenant=True,  # the process group opens it again
        )
    except RuntimeError as error:
        raise UserError(
            f"{here} cannot meet rank 0 at {host}, port {port}, within join_minutes={minutes:g}: "
            f"{str(error).splitlines()[0]}\n"
            "If the port is taken, set MASTER_PORT=<another> for all processes."
        ) from error


def check_alike(processes: list[tuple[str, bool, dict[str, Any]]]) -> None:
    """Refuse processes that differ from rank 0, or that the others cannot reach.

    Args:
        processes: by rank: the machine, whether its own name hides it, its fingerprint.

    Raises:
        UserError: with rank, machine and what differs.
    """
    first_host, _, first = processes[0]
    if any(host != first_host for host, *_ in processes):
        for rank, (host, is_hidden, _) in enumerate(processes):
            if is_hidden:
                raise UserError(
                    f"Rank {rank} on {host} cannot be reached: its machine's name leads to itself "
                    f"alone.\nSet GLOO_SOCKET_IFNAME=<its network interface> there, or give {host} "
                    "its address in /etc/hosts."
                )
    lines = []
    for rank, (host, _, fingerprint) in enumerate(processes):
        if found := differences(first, fingerprint):
            lines.append(f"Rank {rank} on {host} has {few(found)} (rank 0 on {first_host}).\n")
    if lines:
        raise UserError(
            f"{''.join(lines[:5])}All processes of a run need the same code, packages and "
            "settings. A setting that may differ between machines\nbelongs to may_differ in "
            "conf/rules.yaml."
        )


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Say how a fingerprint differs from that of rank 0; files are numbers, others are texts."""
    found = []
    for name in sorted(first.keys() | other.keys()):
        ours, theirs = first.get(name), other.get(name)
        if ours != theirs:
            is_file = isinstance(ours, int) or isinstance(theirs, int)
            found.append(f"another {name}" if is_file else f"{name}={theirs} instead of {ours}")
    return found


def _is_hidden(host: str) -> bool:
    """Whether gloo would hide this machine: its name leads to itself, as Debian writes it."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return False
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0]).startswith(("127.", "::1"))
    except OSError:
        return True


def _checksum(folder: Path) -> str:
    """Compute a checksum of the configs that tell a run's folder from every other one."""
    checksum = 0
    with suppress(OSError):
        os.listdir(folder)  # lets NFS look anew
        # Not the lock's file: closing it would give up this process's lock.
        for path in sorted(folder.glob("*.yaml")):
            checksum = zlib.crc32(path.name.encode() + path.read_bytes(), checksum)
    return str(checksum)
