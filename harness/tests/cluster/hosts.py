"""Two hosts out of Linux's namespaces: each has its own name, address and /etc/hosts.

They are joined by a switch, and share this machine's files and cores. Needs root and iproute2. Each
pair has namespaces of its own, so that several tests may run at once, on the same ports.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from harness.distributed.parent_process import OF_LAUNCHERS
from tests.cluster.forks import fork, is_fast
from tests.conftest import ROOT
from tests.faults.fast_command import Forked

# A busy machine takes ten times as long as a quiet one; a hang lasts longer than that.
PATIENCE_SECONDS = 300.0
LABELS = iter("abcdefghijklmnop")  # of the networks of this process
NEW_MOUNTS, NEW_NAME, NETWORK = 0x20000, 0x4000000, 0x40000000  # Linux's CLONE_NEWNS, ...
BIND, PRIVATE_BELOW = 0x1000, 0x4000 | 0x40000  # Linux's MS_BIND, MS_REC | MS_PRIVATE


def missing() -> str:
    """Why there can be no hosts here; empty where there can be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are made of Linux's network namespaces, by root"
    if shutil.which("ip") is None:
        return "hosts are made with iproute2, which is missing"
    probe = f"probe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this system lets root make no network namespaces"
    _ip("netns", "del", probe)
    return ""


def wait_for(
    is_so: Callable[[], object],
    tell: Callable[[], object],
    seconds: float = PATIENCE_SECONDS,
    pause_seconds: float = 0.002,
) -> None:
    """Look for something until it is so; ``tell`` says more where that takes too long."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not after {seconds:.0f} s:\n{tell()}"
        time.sleep(pause_seconds)


class Started:
    """A command that runs on a host, and what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, log: Path) -> None:
        self.process, self.log = process, log

    def screen(self) -> str:
        """All that it has printed so far."""
        return self.log.read_text(errors="replace")

    def has_ended(self) -> bool:
        """Whether it has an exit status."""
        return self.process.poll() is not None

    def wait(self) -> int:
        """Its exit status; fails where it has none in time."""
        wait_for(self.has_ended, self.screen)
        return self.process.wait()

    def wait_until(self, is_so: Callable[[], object]) -> None:
        """Wait for something that the command does; fails where it ends before."""

        def is_so_now() -> bool:  # perhaps for a moment
            if is_so():
                return True
            assert not self.has_ended(), f"ended with {self.process.returncode}:\n{self.screen()}"
            return False

        wait_for(is_so_now, self.screen)


class Host:
    """One of two machines.

    Args:
        name: of the machine, which both machines resolve to ``address``.
        address: in the network of both.
        namespace: of its network.
        folder: for its /etc/hosts and for what its commands print.
    """

    def __init__(self, name: str, address: str, namespace: str, folder: Path) -> None:
        self.name, self.address, self.namespace, self.folder = name, address, namespace, folder
        self.num_started = 0
        self.processes: list[subprocess.Popen[bytes] | Forked] = []

    def start(
        self,
        arguments: Iterable[str | Path],
        environment: Mapping[str, str] | None = None,
        seen: Mapping[Path, Path] | None = None,
        names: str = "",
    ) -> Started:
        """Start a command on this host.

        Args:
            arguments: the command. "train.py" and "torchrun" are the real programs, without the
                seconds that their imports take.
            environment: variables besides those of this process.
            seen: files and folders that this host has others for: by its path, what is there.
            names: lines of /etc/hosts, which stand for those of the same hosts.
        """
        self.num_started += 1
        hosts = self.folder / f"{self.name}_{self.num_started}.hosts"
        both = [f"{address(number)} host{number}\n" for number in (1, 2)]
        others = [line for line in both if line.split()[1] not in names]
        hosts.write_text(f"{names}127.0.0.1 localhost\n{''.join(others)}")
        mounts = {Path("/etc/hosts"): hosts, **(seen or {})}
        log = self.folder / f"{self.name}_{self.num_started}.log"
        variables = clean_environment() | dict(environment or {})
        command = [*map(str, arguments)]
        enter = partial(enter_host, self.namespace, self.name, mounts)
        if is_fast(command):
            self.processes.append(fork(command, variables, log, enter))
            return Started(self.processes[-1], log)
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=enter,
            )
        self.processes.append(process)
        return Started(process, log)

    def pids(self) -> list[int]:
        """The processes that live on this host."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self) -> None:
        """Kill all processes of this host without a signal before, as when a machine dies."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        while self.processes:
            self.processes.pop().wait()


class Network:
    """Two hosts and the switch between them; the hosts' processes end with it.

    Args:
        folder: for what the hosts write.
    """

    def __init__(self, folder: Path) -> None:
        self.label = f"h{os.getpid()}{next(LABELS)}"
        self.switch = f"{self.label}s"
        self.hosts = [
            Host(f"host{number}", address(number), f"{self.label}n{number}", folder)
            for number in (1, 2)
        ]
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "switch", "up")
        for number, host in enumerate(self.hosts, start=1):
            _ip("netns", "add", host.namespace)
            ends = ("link", "add", "eth0", "netns", host.namespace, "type", "veth")
            _ip(*ends, "peer", "name", f"port{number}", "netns", self.switch)
            _ip("-n", self.switch, "link", "set", f"port{number}", "master", "switch", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", host.namespace, "link", "set", device, "up")

    def clear(self) -> None:
        """Make the hosts as they were, without a process."""
        for host in self.hosts:
            host.kill()

    def close(self) -> None:
        """Remove the hosts."""
        self.clear()
        for namespace in (*(host.namespace for host in self.hosts), self.switch):
            _ip("netns", "del", namespace)


def address(number: int) -> str:
    """The address of a host."""
    return f"10.77.0.{number}"


def clean_environment() -> dict[str, str]:
    """This process's variables less what launchers have set; one thread per process."""
    kept = {name: text for name, text in os.environ.items() if not OF_LAUNCHERS.fullmatch(name)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def enter_host(namespace: str, name: str, mounts: Mapping[Path, Path]) -> None:
    """Let this process be one of a host's, with the host's name and files of its own."""
    libc = ctypes.CDLL(None, use_errno=True)

    def must(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())} ({name})")

    with open(f"/run/netns/{namespace}") as file:
        must(libc.setns(file.fileno(), NETWORK))
    must(libc.unshare(NEW_MOUNTS | NEW_NAME))
    must(libc.mount(b"none", b"/", None, PRIVATE_BELOW, None))
    for path, there in mounts.items():
        must(libc.mount(bytes(there), bytes(path), None, BIND, None))
    socket.sethostname(name)
    os.chdir(os.getcwd())  # through the mounts


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
