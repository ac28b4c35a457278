"""Start a run's further ranks while the first one imports torch, so that all import at once.

Lightning starts them when the first process has built the model, and each of them then imports
for seconds. A rank that was started early imports, and waits on its standard input for the
environment that Lightning gives it. Imports no torch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.processes.launcher import launcher

WAITS = "HARNESS_WAITS"
started: "dict[str, subprocess.Popen[Any]]" = {}  # by LOCAL_RANK


def start(task: str, num_further: int) -> None:
    """Start further ranks where this process is the script ``task``.py and has yet to import."""
    is_script = Path(sys.argv[0]).stem == task and sys.modules["__main__"].__spec__ is None
    is_first = launcher().name == "python" and "LOCAL_RANK" not in os.environ
    if not (is_script and is_first) or "torch" in sys.modules:
        return
    for local_rank in map(str, range(1, num_further + 1)):
        started[local_rank] = subprocess.Popen(
            [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]],  # as Lightning does
            env=os.environ | {"LOCAL_RANK": local_rank, WAITS: "1"},
            stdin=subprocess.PIPE,
        )


def take(
    command: list[str], env: dict[str, str], cwd: str | None = None
) -> "subprocess.Popen[Any]":
    """Replace ``subprocess.Popen`` where Lightning starts a rank: return the one that waits."""
    process = started.pop(env["LOCAL_RANK"], None)
    if process is None or process.poll() is not None:
        return subprocess.Popen(command, env=env, cwd=cwd)
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(env).encode())
    return process


def wait() -> None:
    """In a rank that was started early, wait for its environment; leave where none comes."""
    if os.environ.pop(WAITS, None) is None:
        return
    environment = sys.stdin.read()
    if not environment:  # the first process has ended, and said why
        os._exit(1)
    os.environ.update(json.loads(environment))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
