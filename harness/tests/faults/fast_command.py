"""Start ``train.py`` as a user does, without the seconds that its imports take.

A process that has imported everything is forked; the processes that a run starts are forked from
its first one in turn. From the command line on, it is the real program.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from lightning_fabric.strategies.launchers import subprocess_script as fabric_launcher
from pytorch_lightning.strategies.launchers import subprocess_script as launcher

from harness import sweeps
from harness.command import main as cli
from harness.run import train  # noqa: F401  # imports what a run needs


class Forked:
    """What ``subprocess.Popen`` is for a command, for a fork."""

    def __init__(
        self,
        arguments: list[str],
        env: dict[str, str],
        output: int | None = None,
        is_job: bool = False,
    ) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if is_job:
                os.setsid()
            if output is not None:
                os.dup2(output, 1), os.dup2(output, 2)
            run_command(arguments, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a run", timeout)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class JobsModule:
    """Stands for the module that a sweep starts its jobs with."""

    DEVNULL = subprocess.DEVNULL

    @staticmethod
    def Popen(command: list[str], env: dict[str, str], stdout: Any, **_: Any) -> Forked:  # noqa: N802
        job = Forked(command[1:], env, output=stdout.fileno(), is_job=True)
        while job.poll() is None and os.getpgid(job.pid) != job.pid:
            time.sleep(0.001)
        return job


class SubprocessModule:
    """Stands for the module that Lightning's launcher starts processes with."""

    Popen = staticmethod(lambda command, env, cwd=None: Forked(command[1:], env))


def run_command(arguments: list[str], env: dict[str, str]) -> None:
    """Be train.py, evaluate.py or predict.py, and end."""
    status: Any = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(arguments)
        sys.modules["__main__"].__spec__ = None  # as of a script: Lightning starts no `python -m`
        known = env.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder for folder in known if folder and folder not in sys.path]
        launcher.subprocess = SubprocessModule  # type: ignore[misc,assignment]
        fabric_launcher.subprocess = SubprocessModule  # type: ignore[misc,assignment]
        sweeps.subprocess = JobsModule  # type: ignore[misc,assignment]
        cli.main(Path(arguments[0]).stem, "conf")
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


def start(arguments: list[str], log: Path, env: dict[str, str] | None = None) -> Forked:
    """Start ``python train.py <arguments>`` in a process group of its own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.default_int_handler if signum == 2 else signal.SIG_DFL)
        descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # Not pytest's, which write elsewhere.
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        run_command(["train.py", *arguments], dict(os.environ) | (env or {}))
    process = Forked.__new__(Forked)
    process.pid, process.returncode = pid, None
    while process.poll() is None and os.getpgid(pid) != pid:
        time.sleep(0.001)  # whoever asks for the members of its group must find it
    return process


def members(group: int) -> dict[int, str]:
    """The living processes of a group: their state, by pid."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found[int(stat.parent.name)] = fields[0]
    return found


def wait_until_gone(group: int, seconds: float) -> bool:
    """Whether no process of the group is left within that time."""
    end = time.monotonic() + seconds
    while members(group):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
