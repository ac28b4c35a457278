"""Run a command without its imports: forked from a program that has only those.

Unlike a fork of pytest itself it has none of pytest's filters, handlers, modules and lost threads
(where a test before has used Polars, a command that uses it as well would wait for them for ever):
from the command line on, it is what a user starts.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

from harness.testing import command as typed
from tests.conftest import LIBRARY, PYTHONPATH, ROOT
from tests.faults.fast_command import Forked, Process, run_command

THREE = ("train.py", "evaluate.py", "predict.py")
SERVE = "from tests.faults import fork_server; fork_server.serve()"


def fork(arguments: list[str], env: dict[str, str], path: Path) -> Forked:
    """Fork a command whose two streams go to files beside ``path``."""
    become = partial(run_command, arguments, env)
    return Forked(become, path.with_suffix(".out"), path.with_suffix(".err"))


class Started(Process):
    """A command of the server that runs beside the test."""

    def __init__(self, words: list[str], *paths: Path, env: dict[str, str] | None = None) -> None:
        order = {"arguments": words, "env": os.environ | (env or {})}
        self.pid: int = ask(order | {"cwd": os.getcwd(), "paths": [*map(str, paths)]})

    def poll(self) -> int | None:
        status: int | None = ask({"pid": self.pid})
        return status


def command(
    *arguments: str | Path, environment: dict[str, str] | None = None, timeout: float = 300
) -> "subprocess.CompletedProcess[str]":
    """Run a command by ``harness.testing.command``, unless it is one of the three commands."""
    if arguments[0] not in THREE:
        return typed(*arguments, environment=environment, timeout=timeout)
    words = [*map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        streams = Path(folder, "out"), Path(folder, "err")
        process = Started(words, *streams, env=environment)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        said = [path.read_text() for path in streams]
    return subprocess.CompletedProcess(words, status, *said)


def ask(order: dict[str, Any]) -> Any:
    """The answer of the server."""
    program = server()
    assert program.stdin is not None
    assert program.stdout is not None
    print(json.dumps(order), file=program.stdin, flush=True)
    return json.loads(program.stdout.readline())


@cache
def server() -> "subprocess.Popen[str]":
    """A program that ends with this one; its PYTHONPATH is not that of the test that is first."""
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", SERVE]
    env = os.environ | {"PYTHONPATH": PYTHONPATH}
    return subprocess.Popen(words, cwd=LIBRARY, env=env, stdin=pipe, stdout=pipe, text=True)


def serve() -> None:
    """Start commands, and tell how each has ended, as standard input asks."""
    sys.path[0] = str(ROOT)  # as for a script of that folder
    started: dict[int, Forked] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "pid" in order:
            answer = started[order["pid"]].poll()
        else:
            os.chdir(order["cwd"])
            become = partial(run_command, order["arguments"], order["env"])
            run = Forked(become, *map(Path, order["paths"]))
            started[answer := run.pid] = run
        print(json.dumps(answer), flush=True)
