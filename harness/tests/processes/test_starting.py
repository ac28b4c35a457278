"""The end of a process at the start is named, before the processes are connected."""

import inspect
import logging
import signal
import subprocess
import sys
import threading

import pytest
from pytorch_lightning.strategies.launchers import subprocess_script

from harness.processes import leaving
from harness.processes.dead_ranks import observe


def test_lightning_starts_its_observer_where_ours_takes_its_place() -> None:
    launch = inspect.getsource(subprocess_script._SubprocessScriptLauncher.launch)
    assert "_launch_process_observer(self.procs)" in launch


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGKILL, 1), (signal.SIGTERM, 143)])
def test_end_of_a_rank_is_named(
    signum: signal.Signals,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    left: list[int] = []
    is_over = threading.Event()

    def leave(code: int) -> None:
        left.append(code)
        leaving.connected.set()
        is_over.set()

    monkeypatch.setattr(leaving, "leave", leave)
    monkeypatch.setattr(logging.getLogger("harness"), "propagate", True)
    leaving.connected.clear()
    processes = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(2)
    ]
    threading.Thread(target=observe, args=(processes,), daemon=True).start()
    processes[1].send_signal(signum)
    assert is_over.wait(300)
    assert left == [status]
    assert f"rank 2 has ended at the start ({signum.name})" in caplog.text
    assert processes[0].wait(300) == -signal.SIGKILL


def test_nobody_is_watched_any_more_when_all_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "leave", lambda code: pytest.fail("left"))
    leaving.connected.set()
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    process.wait()
    observe([process])
