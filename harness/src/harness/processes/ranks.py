"""Start a run's further ranks while the first one imports torch, and end with one that ends.

In: the words of this command. Out: the ranks, which Lightning takes where it would start them; and
where one of them ends, the end of this process, and with it, by the kernel, of the others. torchrun
and srun watch the processes that they started themselves. Imports no torch.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from harness.processes import leaving
from harness.processes.launcher import launcher

log = logging.getLogger(__name__)

WAITS = "HARNESS_WAITS"
# A rank that was asked to leave has left; this process was asked as well, and may still save.
ASKED_SECONDS = 5.0
started: dict[str, subprocess.Popen[bytes]] = {}  # by LOCAL_RANK


def start(task: str, num_further: int) -> None:
    """Start further ranks where this process is the script ``task``.py and has yet to import."""
    has_spec = getattr(sys.modules["__main__"], "__spec__", None) is not None
    is_script = Path(sys.argv[0]).stem == task and not has_spec
    is_first = launcher().name == "python" and "LOCAL_RANK" not in os.environ
    if is_script and is_first and "torch" not in sys.modules:
        words = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]  # as Lightning does
        for rank in map(str, range(1, num_further + 1)):
            env = os.environ | {"LOCAL_RANK": rank, WAITS: "1"}
            started[rank] = subprocess.Popen(words, env=env, stdin=subprocess.PIPE)


def wait() -> None:
    """Wait for the environment, in a rank that was started early; leave if none comes."""
    if os.environ.pop(WAITS, None) is not None:
        environment = sys.stdin.read() or os._exit(1)  # the first process ended, and said why
        os.environ.update(json.loads(environment))


def take_over_launcher() -> None:
    """Let Lightning take the ranks that were started early, and observe them with ``observe``."""
    from harness.upstream.processes import replace_process_observer, replace_starter

    if started:
        replace_starter(take)
    replace_process_observer(observe)


def take(words: list[str], env: dict[str, str], cwd: str | None = None) -> subprocess.Popen[bytes]:
    """Return the rank that waits for this environment, where Lightning would start it now."""
    process = started.pop(env["LOCAL_RANK"], None)
    if process is None or process.poll() is not None or process.stdin is None:
        return subprocess.Popen(words, env=env, cwd=cwd)
    process.stdin.write(json.dumps(env).encode())
    process.stdin.close()
    return process


def observe(processes: list[subprocess.Popen[bytes]]) -> None:
    """Watch the processes of the ranks after this one, in their order, each in a thread."""
    leaving.ranks[:] = processes
    first_rank = int(os.environ.get("NODE_RANK") or 0) * (len(processes) + 1)
    for rank, process in enumerate(processes, start=first_rank + 1):
        threading.Thread(target=_wait_for, args=(rank, process), daemon=True).start()


def _wait_for(rank: int, process: subprocess.Popen[bytes]) -> None:
    """Leave when a process ends that the run cannot go on without."""
    status = process.wait()
    signum = -status if status < 0 else status - 128
    if signum in leaving.ASKED_TO_LEAVE:
        time.sleep(ASKED_SECONDS)
    if not status or process not in leaving.ranks:
        return
    # A rank that fails with an error has told it.
    log.log(
        logging.INFO if status == 1 else logging.ERROR,
        "The process of rank %d has ended (%s), and the run ends with it.\n"
        "The same command with resume=auto goes on from the last checkpoint.",
        rank,
        signal.Signals(-status).name if status < 0 else f"exit status {status}",
    )
    leaving.leave(128 + signum if signum in leaving.ASKED_TO_LEAVE else 1)
