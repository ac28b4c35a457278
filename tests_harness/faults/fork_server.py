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
from functools import cache
from pathlib import Path

from harness.testing import command as typed
from tests_harness.conftest import ROOT
from tests_harness.faults import fast_command

THREE = ("train.py", "evaluate.py", "predict.py")
SERVE = "from tests_harness.faults import fork_server; fork_server.serve()"


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
    words, program = [*map(str, arguments)], server()
    assert program.stdin is not None
    assert program.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "screen")
        order = {"arguments": words, "env": os.environ | (environment or {})}
        order |= {"cwd": os.getcwd(), "path": str(path), "timeout": timeout}
        print(json.dumps(order), file=program.stdin, flush=True)
        status = json.loads(program.stdout.readline())
        said = [path.with_suffix(suffix).read_text() for suffix in (".out", ".err")]
    if status is None:
        raise subprocess.TimeoutExpired(words, timeout, *said)
    return subprocess.CompletedProcess(words, status, *said)


@cache
def server() -> "subprocess.Popen[str]":
    """A program that ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVE],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def serve() -> None:
    """Run one command after another, as standard input tells, and tell how each has ended."""
    sys.path[0] = str(ROOT)  # as for a script of that folder
    for line in sys.stdin:
        order = json.loads(line)
        os.chdir(order["cwd"])
        process = Forked(order["arguments"], order["env"], Path(order["path"]))
        try:
            status = process.wait(order["timeout"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        print(json.dumps(status), flush=True)
