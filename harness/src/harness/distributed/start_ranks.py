"""Start the other ranks of a run while rank 0 imports torch, and end the run if one of them ends.

In: this command's arguments. Out: processes that Lightning adopts instead of starting its own. If
one of them ends early, this process ends, and the kernel then ends the others. torchrun and srun
watch their processes by themselves. This module imports no torch.
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

from harness.distributed import shutdown
from harness.distributed.launcher import launcher

log = logging.getLogger(__name__)

WAITS = "HARNESS_WAITS"
# If a signal ended another rank, the same signal reaches this process, which has this long to save.
SIGNAL_SECONDS = 5.0
started: dict[str, subprocess.Popen[bytes]] = {}  # processes by LOCAL_RANK


def start_ranks(task: str, num_further: int) -> None:
    """Start ``num_further`` ranks if this process runs the script ``task``.py.

    It does nothing under a launcher, in a rank that was started here, or after torch was imported.
    """
    has_spec = getattr(sys.modules["__main__"], "__spec__", None) is not None
    is_script = Path(sys.argv[0]).stem == task and not has_spec
    is_local_rank_0 = launcher().name == "python" and "LOCAL_RANK" not in os.environ
    if is_script and is_local_rank_0 and "torch" not in sys.modules:
        command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]  # as Lightning does
        for rank in map(str, range(1, num_further + 1)):
            env = os.environ | {"LOCAL_RANK": rank, WAITS: "1"}
            started[rank] = subprocess.Popen(command, env=env, stdin=subprocess.PIPE)


def wait() -> None:
    """In a rank that was started early, wait for its environment; exit if rank 0 ends first."""
    if os.environ.pop(WAITS, None) is not None:
        environment = sys.stdin.read() or os._exit(1)  # rank 0 has ended, and reported why
        os.environ.update(json.loads(environment))


def patch_lightning_launcher() -> None:
    """Make Lightning adopt the ranks that were started early, and watch them by ``watch_ranks``."""
    from harness.compat.processes import replace_process_observer, replace_starter

    if started:
        replace_starter(adopt_or_start)
    replace_process_observer(watch_ranks)


def adopt_or_start(
    command: list[str], env: dict[str, str], cwd: str | None = None
) -> subprocess.Popen[bytes]:
    """Return the process that was started early for a rank, or start one. Lightning calls this."""
    process = started.pop(env["LOCAL_RANK"], None)
    if process is None or process.poll() is not None or process.stdin is None:
        return subprocess.Popen(command, env=env, cwd=cwd)
    process.stdin.write(json.dumps(env).encode())
    process.stdin.close()
    return process


def watch_ranks(processes: list[subprocess.Popen[bytes]]) -> None:
    """Watch the processes of the other ranks on this machine, each in a thread."""
    shutdown.ranks[:] = processes
    first_rank = int(os.environ.get("NODE_RANK") or 0) * (len(processes) + 1)
    for rank, process in enumerate(processes, start=first_rank + 1):
        threading.Thread(target=_wait_for, args=(rank, process), daemon=True).start()


def _wait_for(rank: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a rank ends, and then end this process, if the run still needs that rank."""
    status = process.wait()
    signum = -status if status < 0 else status - 128
    if signum in shutdown.EXIT_SIGNALS:
        time.sleep(SIGNAL_SECONDS)
    if not status or process not in shutdown.ranks:
        return
    # Status 1: the rank has printed its error.
    log.log(
        logging.INFO if status == 1 else logging.ERROR,
        "The process of rank %d has ended (%s), so the run ends as well.\nUse the same command "
        "with resume=auto to resume from the last checkpoint.",
        rank,
        signal.Signals(-status).name if status < 0 else f"exit status {status}",
    )
    shutdown.exit_now(128 + signum if signum in shutdown.EXIT_SIGNALS else 1)
