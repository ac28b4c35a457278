"""Let the processes that a launcher started as one run compare themselves and share one folder.

In: a ``Launcher``. Out: what rank 0 chose, in every process. Next: the process group, which opens
the same store at the same address. The processes that a run starts by itself do not meet: their
environment carries the folder.
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

from harness.errors import UserError
from harness.processes.launcher import Launcher, number

SHARE_SECONDS = 20.0  # after which a network disk shows to all machines what one has written
READ_SECONDS = 0.5  # in which the others read why rank 0, which may serve the store, ends


class Meeting:
    """Agreement of the processes that were started as one run; one alone agrees at once.

    Args:
        launcher: of this process.
        minutes: how long to wait for another process, at any moment.
    """

    def __init__(self, launcher: Launcher, minutes: float) -> None:
        self.rank, self.minutes = launcher.rank, minutes
        self.others = range(1, launcher.num_processes)
        self.host = socket.gethostname()
        self.store: Any = connect(launcher, minutes) if launcher.is_one_of_several else None
        self.key = "start"  # of the next decision

    def agree(
        self, fingerprint: Callable[[], Mapping[str, Any]], choose: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Stop the run where processes differ; else let rank 0 ``choose`` for all, plain values."""
        if self.store is None:
            return choose()

        def decide(processes: Sequence[Any]) -> Any:
            check_alike(processes)
            return choose()

        return dict(self._decide((self.host, _is_hidden(self.host), fingerprint()), decide))

    def check_shared(self, folder: Path) -> None:
        """Refuse a folder that a process does not see; all wait until all have looked."""
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
            # torchrun's store stays for a start that meets there again.
            for key in ["start", *(f"start/{rank}" for rank in self.others)]:
                self.store.delete_key(key)

        self._decide(self.host if is_other else "", decide)

    def _decide(self, mine: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        """Let rank 0 decide by what each process has, and return that, or raise, in all."""
        key = self.key
        if self.rank > 0:
            self._set(f"{key}/{self.rank}", mine)
            answer = self._get(key, 0)
            if "failure" in answer:
                raise UserError(answer["failure"])
            self.key = answer["next"]
            return answer["value"]
        try:
            value = decide([mine, *(self._get(f"{key}/{rank}", rank) for rank in self.others)])
        except Exception as error:
            text = str(error) if isinstance(error, UserError) else repr(error)
            text = text if text.startswith("Rank ") else f"Rank 0 on {self.host}: {text}"
            with suppress(RuntimeError):  # of the store
                self._set(key, {"failure": text})
                time.sleep(READ_SECONDS)
            raise
        self.key = uuid4().hex  # no answer of a start before can be taken for the next one
        self._set(key, {"value": value, "next": self.key})
        return value

    def _set(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def _get(self, key: str, rank: int) -> Any:
        """Return what the process of a rank writes, or raise where it does not come in time."""
        from torch.distributed import DistStoreError

        try:
            return json.loads(self.store.get(key))
        except DistStoreError as error:
            limit = f"join_minutes={self.minutes:g}"
            raise UserError(f"No answer from rank {rank} within {limit}.") from error
        except RuntimeError as error:
            raise UserError("The process of rank 0 has ended; its output says why.") from error


def connect(launcher: Launcher, minutes: float) -> Any:
    """Open the store of all processes: torchrun's own, else one that rank 0 serves."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, port = launcher.address
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        socket.getaddrinfo(host, None)  # torch would try until the time is over
        store = TCPStore(
            host,
            port,
            world_size=launcher.num_processes,
            is_master=launcher.rank == 0 and not has_agent,
            timeout=timedelta(minutes=minutes),
            wait_for_workers=False,
            multi_tenant=True,  # the process group opens it again
        )
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{socket.gethostname()} cannot meet rank 0 at {host}, port {port}, within "
            f"join_minutes={minutes:g}: {str(error).splitlines()[0]}\nSet MASTER_ADDR=<an address> "
            "(torchrun --local-addr) or MASTER_PORT=<a free port>."
        ) from error
    # torchrun's store keeps the keys of a start that failed; as torch does, count its restarts.
    start = number("TORCHELASTIC_RESTART_COUNT") if has_agent else 0
    return PrefixStore(f"harness/{start}", store)


def check_alike(processes: Sequence[tuple[str, bool, Mapping[str, Any]]]) -> None:
    """Refuse processes that differ from rank 0, or that the others cannot reach.

    Args:
        processes: by rank: the machine, whether its own name hides it, its fingerprint, in which
            checksums of files are numbers and settings are texts.
    """
    first_host, _, first = processes[0]
    are_several = any(host != first_host for host, *_ in processes)
    for rank, (host, is_hidden, other) in enumerate(processes):
        if are_several and is_hidden:
            raise UserError(
                f"Rank {rank} on {host} cannot be reached: its machine's name leads to itself "
                "alone.\nSet GLOO_SOCKET_IFNAME=<its network interface> there."
            )
        if first != other:
            name = min(key for key in {*first, *other} if first.get(key) != other.get(key))
            value = other.get(name)
            what = f"another {name}" if isinstance(value, int) else f"{name}={value}"
            raise UserError(
                f"Rank {rank} on {host} has {what}, unlike rank 0 on {first_host}.\nSettings that "
                "may differ between machines belong to may_differ in conf/rules.yaml."
            )


def _is_hidden(host: str) -> bool:
    """Return whether this machine's name leads to itself, as on Debian: gloo cannot be reached."""
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
