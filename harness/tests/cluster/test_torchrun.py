"""A torchrun on each of two hosts: one of them dies, or a host, and comes back."""

import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, Network, Started
from tests.cluster.runs import (
    NUM_STEPS,
    WORDS,
    alone,
    distance,
    finished,
    num_steps,
    run_folders,
    screens,
    torchrun,
    wait_all,
    where,
)

ELASTIC = torchrun(
    "--max-restarts=9",
    "--monitor-interval=0.2",
    "--rdzv-conf=last_call_timeout=2,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3",
    nnodes="1:2",
)
# Else both torchruns end when a host comes back.
TAKES_BACK = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def start(host: Host, folder: Path, *words: str) -> Started:
    """Start a torchrun that continues with fewer hosts, and with more."""
    # Nodes are not typed: there are two, then one, then two.
    # A real one: a forked torchrun, whose threads are copies, may not outlive a failed worker.
    line = [sys.executable, "-m", "torch.distributed.run", *ELASTIC[1:], "train.py", *WORDS]
    line += ["strategy=ddp", "trainer.devices=1"]
    return host.start([*line, *where(folder, 0.3), *words], TAKES_BACK)


@pytest.mark.slow
def test_a_host_dies_and_comes_back_and_nothing_is_lost(network: Network, folder: Path) -> None:
    one, two = network.hosts
    words = ("checkpoint.every_n_steps=2", "trainer.max_epochs=3")
    first, second = (start(host, folder, *words) for host in (one, two))
    first.wait_until(lambda: num_steps(folder, 1) >= 5)
    two.kill()
    second.wait()
    before = num_steps(folder)
    first.wait_until(lambda: num_steps(folder) >= before + 4)  # alone
    together = num_steps(folder, 1)
    again = start(two, folder, *words)
    first.wait_until(lambda: num_steps(folder, 1) > together)
    assert wait_all([first, again]) == [0, 0], screens([first, again])
    (run_dir,) = run_folders(folder)
    assert finished(folder) == [run_dir]
    # Each of three attempts repeats at most the steps since the last checkpoint.
    assert num_steps(folder) <= 3 * NUM_STEPS + 3 * 3
    assert distance(run_dir, alone(network, folder, "trainer.max_epochs=3")) <= 1e-12


@pytest.mark.ci
def test_torchrun_on_one_host_trains_what_one_process_does(network: Network, folder: Path) -> None:
    words = torchrun(num_processes=2, nnodes="1")
    words += ["train.py", *WORDS, "strategy=ddp", "trainer.devices=2", *where(folder)]
    started = network.hosts[0].start(words)
    assert started.wait() == 0, started.screen()
    assert finished(folder) == run_folders(folder)
    (run_dir,) = run_folders(folder)
    assert distance(run_dir, alone(network, folder)) <= 1e-12
