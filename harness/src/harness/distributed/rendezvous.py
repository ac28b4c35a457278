"""Compare the processes that a launcher started as one run, and give them one folder.

In: a ``Launcher``. Out: the decision of rank 0, in every process. Next: the process group, which
opens the same store at the same address. Ranks that the run starts by itself need no rendezvous:
an environment variable tells them the folder.
"""

import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from harness.distributed.launcher import Launcher, number
from harness.errors import UserError

SHARE_SECONDS = 20.0  # a network disk shows a new file to all machines within this time
READ_SECONDS = 0.5  # rank 0 serves the store for this long after an error, so that others read it


class Rendezvous:
    """Decisions that the processes of one run share; a single process decides at once.

    Args:
        launcher: the launcher of this process.
        minutes: the longest time to wait for another process, in each operation.
    """

    def __init__(self, launcher: Launcher, minutes: float) -> None:
        self.rank, self.minutes = launcher.rank, minutes
        self.others = range(1, launcher.num_processes)
        self.host = socket.gethostname()
        self.store: Any = connect(launcher, minutes) if launcher.has_several_processes else None
        self.key = "start"  # the store's key of the next decision

    def agree(
        self, fingerprint: Callable[[], Mapping[str, Any]], choose: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the result of ``choose`` on rank 0, in all processes.

        Args:
            fingerprint: returns settings and checksums that must be equal in all processes.
            choose: returns JSON values; called on rank 0 only.

        Raises:
            UserError: in all processes, if a fingerprint differs.
        """
        if self.store is None:
            return choose()

        def decide(processes: Sequence[Any]) -> Any:
            check_equal(processes)
            return choose()

        return dict(self._decide((self.host, _is_hidden(self.host), fingerprint()), decide))

    def check_shared(self, folder: Path) -> None:
        """Raise a ``UserError`` in all processes if one of them does not see the folder."""
        if self.store is None:
            return
        if self.rank == 0:
            self._set(f"{self.key}/files", _checksum(folder))
        files, end = self._get(f"{self.key}/files", 0), time.monotonic() + SHARE_SECONDS
        while (is_other := _checksum(folder) != files) and time.monotonic() < end:
            time.sleep(0.05)

        def decide(hosts: Sequence[str]) -> None:
            for host in filter(None, hosts):
                raise UserError(
                    f"{host} does not see {folder}, which rank 0 has on its machine.\n"
                    "Use output_dir=<a folder on a disk that all machines share>."
                )
            # A restart that torchrun does not count uses the same store and the same keys.
            for key in ["start", *(f"start/{rank}" for rank in self.others)]:
                self.store.delete_key(key)

        self._decide(self.host if is_other else "", decide)

    def _decide(self, value_here: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        """Call ``decide`` on rank 0 with the values of all ranks; return its result everywhere.

        If ``decide`` raises an error, all processes raise the same text.
        """
        key = self.key
        if self.rank > 0:
            self._set(f"{key}/{self.rank}", value_here)
            answer = self._get(key, 0)
            if "failure" in answer:
                raise UserError(answer["failure"])
            self.key = answer["next"]
            return answer["value"]
        try:
            others = (self._get(f"{key}/{rank}", rank) for rank in self.others)
            value = decide([value_here, *others])
        except Exception as error:
            text = str(error) if isinstance(error, UserError) else repr(error)
            text = text if text.startswith("Rank ") else f"Rank 0 on {self.host}: {text}"
            with suppress(RuntimeError):  # the store may have failed
                self._set(key, {"failure": text})
                time.sleep(READ_SECONDS)
            raise
        self.key = uuid4().hex  # unique, so that no answer to an earlier start is read
        self._set(key, {"value": value, "next": self.key})
        return value

    def _set(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def _get(self, key: str, rank: int) -> Any:
        """Return the value that a rank writes; raise a ``UserError`` if there is none in time."""
        from torch.distributed import DistStoreError

        try:
            return json.loads(self.store.get(key))
        except DistStoreError as error:
            raise UserError(
                f"No answer from rank {rank} within join_minutes={self.minutes:g}.\nRead that "
                "rank's output, or set a larger join_minutes."
            ) from error
        except RuntimeError as error:
            raise UserError(
                "The process of rank 0 has ended. Read the output of rank 0."
            ) from error


def connect(launcher: Launcher, minutes: float) -> Any:
    """Return the key-value store of all processes: torchrun's, or one that rank 0 serves."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = launcher.address
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        socket.getaddrinfo(host, None)  # fail at once; torch would try until the timeout
        store = TCPStore(
            host,
            port,
            world_size=launcher.num_processes,
            is_master=launcher.rank == 0 and not has_agent,
            timeout=timedelta(minutes=minutes),
            wait_for_workers=False,
            multi_tenant=True,  # the process group will open the same store
        )
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{socket.gethostname()} cannot reach rank 0 at {host}, port {port}, within "
            f"join_minutes={minutes:g}: {str(error).splitlines()[0]}\nSet MASTER_ADDR=<an address> "
            "(torchrun --local-addr) or MASTER_PORT=<a free port>."
        ) from error
    # torchrun's store keeps the keys of a failed start, so each restart gets its own prefix.
    start = number("TORCHELASTIC_RESTART_COUNT") if has_agent else 0
    return PrefixStore(f"harness/{start}", store)


def check_equal(processes: Sequence[tuple[str, bool, Mapping[str, Any]]]) -> None:
    """Raise a ``UserError`` if a process differs from rank 0, or cannot be reached.

    Args:
        processes: by rank: the host name, whether ``_is_hidden``, and the fingerprint. In a
            fingerprint, checksums of files are integers, and settings are strings.
    """
    first_host, _, first = processes[0]
    are_several = any(host != first_host for host, *_ in processes)
    for rank, (host, is_hidden, other) in enumerate(processes):
        if are_several and is_hidden:
            raise UserError(
                f"Rank {rank} on {host} cannot be reached, because that machine resolves its name "
                f"{host} to a local address.\nSet GLOO_SOCKET_IFNAME=<a network interface> on "
                "that machine."
            )
        if first != other:
            name = min(key for key in {*first, *other} if first.get(key) != other.get(key))
            here, there = (
                f"{name}={v[name]}" if name in v else f"no {name}" for v in (other, first)
            )
            ranks = f"Rank {rank} ({host}) has {here}, rank 0 ({first_host}) has {there}."
            if isinstance(other.get(name), int):  # a checksum
                ranks = f"Rank {rank} ({host}) and rank 0 ({first_host}) differ in {name}."
            raise UserError(
                f"{ranks}\nUse the same code, packages and settings on all machines. If a setting "
                "may differ between machines, add it to may_differ in conf/rules.yaml."
            )


def _is_hidden(host: str) -> bool:
    """Return whether this machine's name resolves to a loopback address, as on Debian.

    Other machines then cannot reach this one by gloo.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return False
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0]).startswith(("127.", "::1"))
    except OSError:
        return True


def _checksum(folder: Path) -> str:
    """Return a checksum of the configs in a run's folder, which differ from any other run's."""
    checksum = 0
    with suppress(OSError):
        os.listdir(folder)  # makes NFS refresh its cache
        # Do not open the lock file: closing it would release this process's lock.
        for path in sorted(folder.glob("*.yaml")):
            checksum = zlib.crc32(path.name.encode() + path.read_bytes(), checksum)
    return str(checksum)
