"""Start ``train.py`` as a user does, without the seconds that its imports take.

A process that has imported everything is forked; the processes that a run starts are forked from
its first one in turn. From the command line on, it is the real program. Nothing may have computed
in it with several threads, which a fork lacks: OMP_NUM_THREADS=1.
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
from contextlib import suppress
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NoReturn

from lightning_fabric.strategies.launchers import subprocess_script as fabric_launcher
from pytorch_lightning.strategies.launchers import subprocess_script as launcher

from harness.command import main as cli
from harness.sweeps import processes
from harness.training import train  # noqa: F401  # imports what a run needs

BEGAN_WITH = os.environ.get("PYTHONPATH", "").split(os.pathsep)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Process:
    """The part of ``subprocess.Popen`` that tests use, for any process with a status."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, if it has ended."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""
        end = time.monotonic() + (timeout or 300)
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a command", timeout or 300)
            time.sleep(0.005)
        return status

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    terminate = partialmethod(send_signal, signal.SIGTERM)
    kill = partialmethod(send_signal, signal.SIGKILL)


class Forked(Process):
    """A fork of this process.

    Args:
        become: what it does; it ends if that returns.
        output: the file that it prints into; ``None`` is where this process does.
        errors: the file of its standard error, if that is another one.
        leads: it leads a session of its own, and has inherited no socket and no handler.
    """

    def __init__(
        self,
        become: Callable[[], object],
        output: Path | None = None,
        errors: Path | None = None,
        leads: bool = True,
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if leads:
                    lead_session(output, errors)
                become()
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        while leads and self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)  # so that a list of the group's members has it

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def lead_session(output: Path | None, errors: Path | None) -> None:
    """Be what a process is that a program has just started."""
    os.setsid()
    gc.freeze()  # objects of the parent process are never collected here
    faulthandler.disable()  # pytest's would write into a file that is closed here
    for signum in SIGNALS:
        default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        signal.signal(signum, default)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, output), (2, errors or output)):
        if path is not None:
            os.dup2(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
    # A port that another process listens to would stay open. Pipes may be of libuv, which has made
    # them for this fork.
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # of that list itself
            if number > 2 and os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                os.close(number)
    # Not pytest's, which write elsewhere; nor may they close what a fork of this one prints into.
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)


class JobsModule:
    """Stands for the module that a sweep starts its jobs with."""

    DEVNULL = subprocess.DEVNULL

    @staticmethod
    def Popen(command: list[str], env: dict[str, str], stdout: Any, **_: Any) -> Forked:  # noqa: N802
        return Forked(partial(run_command, command[1:], env), Path(stdout.name))


class RanksModule:
    """Stands for the module that Lightning's launcher starts processes with, in its own group."""

    @staticmethod
    def Popen(command: list[str], env: dict[str, str], cwd: Any = None) -> Forked:  # noqa: N802
        return Forked(partial(run_command, command[1:], env), leads=False)


def run_command(arguments: list[str], env: dict[str, str]) -> NoReturn:
    """Be train.py, evaluate.py or predict.py, and end."""

    def command() -> None:
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(arguments)
        sys.modules["__main__"].__spec__ = None  # as of a script: Lightning starts no `python -m`
        follow_pythonpath(env)
        launcher.subprocess = RanksModule  # type: ignore[misc,assignment]
        fabric_launcher.subprocess = RanksModule  # type: ignore[misc,assignment]
        processes.subprocess = JobsModule  # type: ignore[misc,assignment]
        cli.main(Path(arguments[0]).stem, "conf")

    be(command)


def follow_pythonpath(env: dict[str, str]) -> None:
    """Search modules where a new interpreter would; refuse a module that is imported already."""
    folders = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    first, *others = sys.path
    others = [folder for folder in others if folder not in BEGAN_WITH]
    sys.path[:] = dict.fromkeys([first, *folders, *others])
    sys.path_importer_cache.clear()
    for folder in {*folders} - {*BEGAN_WITH}:
        for name in {path.stem for path in Path(folder).glob("*.py")} & sys.modules.keys():
            file = getattr(sys.modules[name], "__file__", None) or "a built-in"
            if Path(file).parent != Path(folder):
                raise ImportError(
                    f"{name} of PYTHONPATH is imported already, from {file}. "
                    "Use harness.testing.command, which starts a new interpreter."
                )


def be(program: Callable[[], object]) -> NoReturn:
    """Run a program, and end with the status that it leaves with."""
    status: Any = 1
    try:
        program()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def start(arguments: list[str], log: Path, env: dict[str, str] | None = None) -> Forked:
    """Start ``python train.py <arguments>`` in a process group of its own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    words = ["train.py", *arguments]
    return Forked(partial(run_command, words, dict(os.environ) | (env or {})), log)


def members(group: int) -> dict[int, str]:
    """The living processes of a group: their name, by pid."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state != "Z":
            found[int(stat.parent.name)] = name
    return found


def wait_until_gone(group: int, seconds: float) -> bool:
    """Whether no process of the group is left within that time."""
    end = time.monotonic() + seconds
    while members(group):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
