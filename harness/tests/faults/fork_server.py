"""Run a command without its imports: forked from a program that has only those.

Unlike a fork of pytest itself it has none of pytest's filters, handlers, modules and lost threads
(where a test before has used Polars, a command that uses it as well would wait for them for ever):
from the command line on, it is what a user starts.
"""

import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any, TextIO

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
    connection, _ = server()
    print(json.dumps(order), file=connection, flush=True)
    return json.loads(connection.readline())


@cache
def server() -> tuple[TextIO, "subprocess.Popen[str] | None"]:
    """The connection with a program that ends with the last worker of pytest, and the program.

    The first worker that needs it starts it. Its PYTHONPATH is not that of the test that is first.
    """
    folder = Path(tempfile.gettempdir(), f"fork_servers_{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    address = folder / os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    connection, process = socket.socket(socket.AF_UNIX), None
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other workers wait
        try:
            connection.connect(str(address))
        except OSError:  # there is no server, or the file of one that was killed
            address.unlink(missing_ok=True)
            words = [sys.executable, "-c", SERVE, str(address)]
            env = os.environ | {"PYTHONPATH": PYTHONPATH}
            process = subprocess.Popen(
                words, cwd=LIBRARY, env=env, start_new_session=True, text=True
            )
            while not address.exists():
                assert process.poll() is None
                time.sleep(0.01)
            connection.connect(str(address))
    return connection.makefile("rw"), process


def serve() -> None:
    """Start commands, and tell how each has ended, as the workers ask."""
    address = Path(sys.argv[1])
    sys.path[0] = str(ROOT)  # as for a script of that folder
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen()
    os.rename(f"{address}.new", address)
    listener.settimeout(60)  # for the first worker, which may have been killed
    started: dict[int, Forked] = {}
    with selectors.DefaultSelector() as selector:
        first, _ = listener.accept()
        selector.register(first, selectors.EVENT_READ, first.makefile("rw"))
        selector.register(listener, selectors.EVENT_READ, None)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    accepted, _ = listener.accept()
                    selector.register(accepted, selectors.EVENT_READ, accepted.makefile("rw"))
                elif line := key.data.readline():
                    print(json.dumps(answer(json.loads(line), started)), file=key.data, flush=True)
                else:
                    selector.unregister(key.fileobj)
            if len(selector.get_map()) == 1:
                address.unlink()
                return


def answer(order: dict[str, Any], started: dict[int, Forked]) -> int | None:
    """Start a command and return its process, or return the status of one."""
    if "pid" in order:
        return started[order["pid"]].poll()
    os.chdir(order["cwd"])
    become = partial(run_command, order["arguments"], order["env"])
    run = Forked(become, *map(Path, order["paths"]))
    started[run.pid] = run
    return run.pid
