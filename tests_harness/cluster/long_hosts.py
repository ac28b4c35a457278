"""Two hosts for longer: figures of weights and seconds, for the table of ``__main__``."""

import signal
import threading
import time
from functools import partial
from pathlib import Path

from tests_harness.cluster.hosts import Network
from tests_harness.cluster.runs import (
    DDP,
    alone,
    distance,
    finished,
    num_steps,
    pid_of_rank,
    run_folders,
    start_both,
    stop,
    torchrun,
    wait_all,
    where,
)
from tests_harness.cluster.test_torchrun import start
from tests_harness.figures import Rows

BAR = 1e-12  # of weights in double precision
ALONE_SECONDS, BACK_SECONDS = 90.0, 60.0
LONG = ("trainer.max_epochs=20", "checkpoint.every_n_steps=10")  # 400 steps
LIMIT_SECONDS = 600.0


def hosts(folder: Path) -> Rows:
    """Two hosts, ddp and ddp2, one and two processes each, against one process."""
    rows: Rows = {}
    network = Network(folder)
    reference = alone(network, folder, "trainer.max_epochs=3")
    cases = {
        "ddp, 1 process each": (1, DDP),
        "ddp, 2 processes each": (2, ("strategy=ddp", "trainer.devices=2", "trainer.num_nodes=2")),
        "ddp2, 2 devices each": (1, ("strategy=ddp2", "trainer.devices=2", "trainer.num_nodes=2")),
    }
    for number, (name, (num_processes, words)) in enumerate(cases.items()):
        there, began = folder / str(number), time.monotonic()
        launcher = torchrun(num_processes=num_processes)
        started = start_both(
            network, *words, *where(there), "trainer.max_epochs=3", launcher=launcher
        )
        statuses, seconds = wait_all(started, LIMIT_SECONDS), time.monotonic() - began
        runs = finished(there)
        found = distance(runs[0], reference) if len(runs) == 1 else float("nan")
        rows[f"2 hosts, {name}"] = (
            statuses == [0, 0] and found <= BAR,
            f"status {statuses}, weights {found:.1e} from one process, {seconds:.0f} s",
        )
    network.close()
    return rows


def host(folder: Path) -> Rows:
    """kill -9 of the second host under an elastic torchrun, and its return."""
    return {"kill -9 of a host, its return": _lose(folder, is_cut=False)}


def link(folder: Path) -> Rows:
    """The second host's plug is pulled for a minute; its torchrun is started again if it ends."""
    return {"a link cut for 60 s": _lose(folder, is_cut=True)}


def _lose(folder: Path, is_cut: bool) -> tuple[bool, str]:
    network = Network(folder)
    reference = alone(network, folder, *LONG)
    one, two = network.hosts
    first, second = (start(host, folder, *LONG, seconds_per_batch=0.3) for host in (one, two))
    try:
        first.wait_until(lambda: num_steps(folder, 1) >= 25)
        lost = time.monotonic()
        if is_cut:
            network.cut(2)
        else:
            two.kill()
        before = num_steps(folder)
        first.wait_until(lambda: num_steps(folder) >= before + 4, LIMIT_SECONDS)
        alone_seconds = time.monotonic() - lost
        if is_cut:
            time.sleep(max(0.0, lost + 60 - time.monotonic()))
            network.mend(2)
        returned, together = time.monotonic(), num_steps(folder, 1)

        def is_back() -> bool:
            nonlocal second
            if not second.is_alive():  # as a service that starts it again does
                second = start(two, folder, *LONG, seconds_per_batch=0.3)
            return num_steps(folder, 1) > together

        first.wait_until(is_back, LIMIT_SECONDS)
        back_seconds = time.monotonic() - returned
        statuses = wait_all([first, second], LIMIT_SECONDS)
        (run_dir,) = run_folders(folder)
        found = distance(run_dir, reference)
    except (AssertionError, ValueError) as error:
        return False, " ".join(str(error).split())[-400:]
    finally:
        network.close()
    return (
        statuses == [0, 0]
        and found <= BAR
        and alone_seconds < ALONE_SECONDS
        and back_seconds < BACK_SECONDS,
        f"alone after {alone_seconds:.0f} s, back after {back_seconds:.0f} s, status {statuses}, "
        f"weights {found:.1e} from one process",
    )


def skew(folder: Path) -> Rows:
    """One rank stands still for 2 s when the signal comes; ten times."""
    network, good, wrong = Network(folder), 0, []
    for number in range(10):
        network.clear()
        there = folder / str(number)
        started = start_both(network, *DDP, *where(there, 0.1), "trainer.max_epochs=50")
        begun = partial(num_steps, there, 1)
        started[0].wait_until(lambda begun=begun, least=5 + number: begun() >= least)
        pids = [pid_of_rank(there, rank) for rank in (0, 1)]
        late = pids[number % 2]
        stop([late], signal.SIGSTOP)
        timer = threading.Timer(2.0, stop, ([late], signal.SIGCONT))
        timer.start()
        stop(pids, signal.SIGUSR1)
        try:
            wait_all(started, 120)
            (run_dir,) = run_folders(there)
            is_saved = any((run_dir / "checkpoints").glob("step_*.ckpt"))
            assert is_saved, f"{number}: nothing saved"
            good += 1
        except AssertionError as error:
            wrong.append(" ".join(str(error).split())[:200])
        timer.join()
    network.close()
    return {"ranks stopped for 2 s when the signal comes": (good == 10, f"{good} of 10 {wrong}")}
