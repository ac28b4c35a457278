"""Run a command to its end without its imports: forked from a program that has only those.

Unlike a fork of pytest itself it has none of pytest's filters, handlers and modules: from the
command line on, it is what a user starts.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from harness.testing import command as typed
from tests.conftest import LIBRARY, ROOT
from tests.faults import fast_command

THREE = ("train.py", "evaluate.py", "predict.py")
SERVE = "from tests.faults import fork_server; fork_server.serve()"


class Forked(fast_command.Forked):
    """A command with its two streams in files."""

    def __init__(self, arguments: list[str], env: dict[str, str], path: Path) -> None:
        self.returncode = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, suffix in ((1, ".out"), (2, ".err")):
                flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
                os.dup2(os.open(path.with_suffix(suffix), flags), number)
            # Not pytest's, which write elsewhere.
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            fast_command.run_command(arguments, env)


def command(
    *arguments: str | Path, environment: dict[str, str] | None = None, timeout: float = 300
) -> "subprocess.CompletedProcess[str]":
    """What ``harness.testing.command`` gives, which runs all but the three commands."""
    if arguments[0] not in THREE:
        return typed(*arguments, environment=environment, timeout=timeout)
    words = [*map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "screen")
        order = {"arguments": words, "env": os.environ | (environment or {})}
        order |= {"cwd": os.getcwd(), "path": str(path), "timeout": timeout}
        status = ask(order)
        said = [path.with_suffix(suffix).read_text() for suffix in (".out", ".err")]
    if status is None:
        raise subprocess.TimeoutExpired(words, timeout, *said)
    return subprocess.CompletedProcess(words, status, *said)


class Started:
    """A command of the server that runs beside the test: what ``fast_command.Forked`` is."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        order = {"arguments": arguments, "env": dict(os.environ), "cwd": os.getcwd()}
        self.pid: int = ask(order | {"log": str(log)})

    def poll(self) -> int | None:
        status: int | None = ask({"pid": self.pid})
        return status

    def wait(self, timeout: float = 300) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a command", timeout)
            time.sleep(0.02)
        return status

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


def start(arguments: list[str], log: Path) -> Started:
    """Start ``train.py`` beside the test, in a process group of its own.

    ``fast_command.start`` forks the test's own process, of which threads are lost: where a test
    before has used Polars, a command that uses it as well would wait for them for ever.
    """
    return Started(arguments, log)


def ask(order: dict[str, Any]) -> Any:
    """What the server answers."""
    program = server()
    assert program.stdin is not None
    assert program.stdout is not None
    print(json.dumps(order), file=program.stdin, flush=True)
    return json.loads(program.stdout.readline())


@cache
def server() -> "subprocess.Popen[str]":
    """A program that ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVE],
        cwd=LIBRARY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def serve() -> None:
    """Run one command after another, as standard input tells, and tell how each has ended."""
    sys.path[0] = str(ROOT)  # as for a script of that folder
    beside: dict[int, fast_command.Forked] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "pid" in order:
            print(json.dumps(beside[order["pid"]].poll()), flush=True)
            continue
        os.chdir(order["cwd"])
        if "log" in order:
            run = fast_command.start(order["arguments"], Path(order["log"]), order["env"])
            beside[run.pid] = run
            print(run.pid, flush=True)
            continue
        process = Forked(order["arguments"], order["env"], Path(order["path"]))
        try:
            status = process.wait(order["timeout"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        print(json.dumps(status), flush=True)
