"""Let the processes that a launcher started as one run compare themselves and share one folder.

In: a ``Launcher``. Out: what rank 0 chose, in every process. Next: the process group, which opens
the same store at the same address. The processes that a run starts by itself do not meet: their
environment carries the folder.

Keys in the store: ``process/<rank>`` describes a process, ``choice`` is what rank 0 chose,
``files`` a checksum of its folder, ``ready/<rank>`` names a machine that does not see the same, and
``shared`` ends the meeting. An answer of rank 0 is a value, or why the run ends.
"""

import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UserError
from harness.processes.launcher import Launcher, number

if TYPE_CHECKING:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

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
        self.store = connect(launcher, minutes) if launcher.is_one_of_several else None

    def agree(
        self, fingerprint: Callable[[], Mapping[str, Any]], choose: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Stop the run where processes differ; else let rank 0 choose for all.

        Args:
            fingerprint: of code and settings: plain values by name.
            choose: what the run needs, as plain values; only rank 0 calls it.

        Raises:
            UserError: with rank, machine, and the first difference.
        """
        if self.store is None:
            return choose()
        process = (self.host, _is_hidden(self.host), fingerprint())
        if self.rank > 0:
            self._set(f"process/{self.rank}", process)
            return dict(self._answer("choice"))
        with self._telling("choice"):
            check_alike([process, *(self._get(f"process/{rank}", rank) for rank in self.others)])
            choice = choose()
            self._set("choice", {"value": choice})
        return choice

    def check_shared(self, folder: Path) -> None:
        """Refuse a folder that a process does not see; all wait until all have looked.

        Raises:
            UserError: with the machine that does not see it.
        """
        if self.store is None:
            return
        if self.rank > 0:
            checksum, end = self._get("files", 0), time.monotonic() + SHARE_SECONDS
            while (is_other := _checksum(folder) != checksum) and time.monotonic() < end:
                time.sleep(0.05)
            self._set(f"ready/{self.rank}", self.host if is_other else "")
            self._answer("shared")
            return
        with self._telling("shared"):
            self._set("files", _checksum(folder))
            for host in [self._get(f"ready/{rank}", rank) for rank in self.others]:
                if host:
                    raise UserError(
                        f"{host} does not see {folder}, which rank 0 has on its machine.\n"
                        "Use output_dir=<a folder on a disk that all machines share>."
                    )
            # torchrun's store stays for a start that meets there again.
            of_ranks = [f"{key}/{rank}" for rank in self.others for key in ("process", "ready")]
            for key in ["choice", "files", *of_ranks]:
                self.store.delete_key(key)
            self._set("shared", {"value": None})

    def _set(self, key: str, value: Any) -> None:
        assert self.store is not None
        self.store.set(key, json.dumps(value))

    def _get(self, key: str, rank: int) -> Any:
        """Return what the process of a rank writes, or raise where it does not come in time."""
        from torch.distributed import DistStoreError

        assert self.store is not None
        try:
            return json.loads(self.store.get(key))
        except DistStoreError as error:
            limit = f"join_minutes={self.minutes:g}"
            raise UserError(f"No answer from rank {rank} within {limit}.") from error
        except RuntimeError as error:
            raise UserError("The process of rank 0 has ended; its output says why.") from error

    def _answer(self, key: str) -> Any:
        """Return what rank 0 answers, or raise what it fails with."""
        answer = self._get(key, 0)
        if "failure" in answer:
            raise UserError(answer["failure"])
        return answer["value"]

    @contextmanager
    def _telling(self, key: str) -> Iterator[None]:
        """Answer the other processes with an error that ends rank 0."""
        try:
            yield
        except Exception as error:
            text = str(error) if isinstance(error, UserError) else repr(error)
            text = text if text.startswith("Rank ") else f"Rank 0 on {self.host}: {text}"
            with suppress(RuntimeError):  # of the store
                self._set(key, {"failure": text})
                time.sleep(READ_SECONDS)
            raise


def connect(launcher: Launcher, minutes: float) -> "PrefixStore":
    """Open the store of all processes: torchrun's own, else one that rank 0 serves.

    Raises:
        UserError: if the machine of rank 0 has no address, or nobody answers there.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    (host, port), here = launcher.address, socket.gethostname()
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
            f"{here} cannot meet rank 0 at {host}, port {port}, within join_minutes={minutes:g}: "
            f"{str(error).splitlines()[0]}\n"
            f"If {host} has no address, add it to /etc/hosts, or set MASTER_ADDR=<address>, with "
            "torchrun --local-addr=<address>.\nIf the port is taken, set MASTER_PORT=<another>."
        ) from error
    # torchrun's store keeps the keys of a start that failed; as torch does, count its restarts.
    start = number("TORCHELASTIC_RESTART_COUNT") if has_agent else 0
    return PrefixStore(f"harness/{start}", store)


def check_alike(processes: list[tuple[str, bool, Mapping[str, Any]]]) -> None:
    """Refuse processes that differ from rank 0, or that the others cannot reach.

    Args:
        processes: by rank: the machine, whether its own name hides it, its fingerprint, in which
            checksums of files are numbers and settings are texts.

    Raises:
        UserError: with rank, machine and the first difference.
    """
    first_host, _, first = processes[0]
    are_several = any(host != first_host for host, *_ in processes)
    for rank, (host, is_hidden, other) in enumerate(processes):
        if are_several and is_hidden:
            raise UserError(
                f"Rank {rank} on {host} cannot be reached: its machine's name leads to itself "
                f"alone.\nSet GLOO_SOCKET_IFNAME=<its network interface> there, or give {host} "
                "its address in /etc/hosts."
            )
        if first != other:
            name = min(key for key in {*first, *other} if first.get(key) != other.get(key))
            ours, theirs = first.get(name), other.get(name)
            is_file = isinstance(ours, int) or isinstance(theirs, int)
            what = f"another {name}" if is_file else f"{name}={theirs} instead of {ours}"
            raise UserError(
                f"Rank {rank} on {host} has {what} (rank 0 on {first_host}).\nAll processes of a "
                "run need the same code, packages and settings. A setting that may differ between "
                "machines\nbelongs to may_differ in conf/rules.yaml."
            )


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
