"""Start a run's further ranks while the first one imports torch, so that all import at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

from harness.processes.launcher import launcher

WAITS = "HARNESS_WAITS"
started: dict[str, subprocess.Popen[bytes]] = {}  # by LOCAL_RANK


def start(task: str, num_further: int) -> None:
    """Start further ranks where this process is the script ``task``.py and has yet to import."""
    is_script = (
        Path(sys.argv[0]).stem == task
        and getattr(sys.modules["__main__"], "__spec__", None) is None
    )
    is_first = launcher().name == "python" and "LOCAL_RANK" not in os.environ
    if is_script and is_first and "torch" not in sys.modules:
        words = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]  # as Lightning does
        for rank in map(str, range(1, num_further + 1)):
            env = os.environ | {"LOCAL_RANK": rank, WAITS: "1"}
            started[rank] = subprocess.Popen(words, env=env, stdin=subprocess.PIPE)


def take(words: list[str], env: dict[str, str], cwd: str | None = None) -> subprocess.Popen[bytes]:
    """Return the rank that waits for this environment, where Lightning would start it now."""
    process = started.pop(env["LOCAL_RANK"], None)
    if process is None or process.poll() is not None or process.stdin is None:
        return subprocess.Popen(words, env=env, cwd=cwd)
    process.stdin.write(json.dumps(env).encode())
    process.stdin.close()
    return process


def wait() -> None:
    """In a rank that was started early, wait for its environment; leave where none comes."""
    if os.environ.pop(WAITS, None) is not None:
        environment = sys.stdin.read() or os._exit(1)  # the first process ended, and said why
        os.environ.update(json.loads(environment))
