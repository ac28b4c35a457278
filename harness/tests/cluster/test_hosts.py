"""Two hosts train as one process does, or an error says why they cannot."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Network, Started
from tests.cluster.runs import (
    WORDS,
    alone,
    distance,
    run_folders,
    screens,
    torchrun,
    wait_all,
    where,
)
from tests.conftest import ROOT, ci, slow

DDP = ("strategy=ddp", "trainer.devices=1")
CODE = ROOT / "src/small/models.py"
OF_WORKER = r"rank\d\]: Traceback \(most recent call last\)"  # torchrun's own report has one


@pytest.fixture
def start_both(network: Network, folder: Path) -> Callable[..., list[Started]]:
    """Start the same command on both hosts by torchrun; the second has more arguments."""

    def start(
        *overrides: str, num_processes: int = 1, other: tuple[str, ...] = ()
    ) -> list[Started]:
        line = [
            *torchrun(num_processes=num_processes),
            "train.py",
            *WORDS,
            *where(folder),
            *overrides,
        ]
        one, two = network.hosts
        started = [one.start(line), two.start([*line, *other])]
        assert wait_all(started) == [0, 0], screens(started)
        return started

    return start


@pytest.mark.ci
def test_two_hosts_train_and_resume_what_one_process_does(
    start_both: Callable[..., list[Started]], network: Network, folder: Path
) -> None:
    """Keys without effect on the weights may differ; torchrun sets the number of nodes."""
    assert "2 processes" in start_both(*DDP)[0].screen()
    (run_dir,) = run_folders(folder)
    assert distance(run_dir, alone(network, folder)) <= 1e-12
    further = ("trainer.max_epochs=2", "resume=auto")
    start_both(*DDP, *further, other=("data.num_workers=1",))
    assert run_folders(folder) == [run_dir]
    assert distance(run_dir, alone(network, folder, *further)) <= 1e-12


@pytest.mark.parametrize(("strategy", "num_processes"), slow(("ddp2", 1), ("ddp", 2)))
def test_two_hosts_train_with_two_devices_each(
    strategy: str,
    num_processes: int,
    start_both: Callable[..., list[Started]],
    network: Network,
    folder: Path,
) -> None:
    overrides = (f"strategy={strategy}", "trainer.devices=2", "trainer.num_nodes=2")
    start_both(*overrides, num_processes=num_processes)
    (run_dir,) = run_folders(folder)
    assert distance(run_dir, alone(network, folder)) <= 1e-12


@pytest.mark.slow
def test_two_hosts_evaluate_and_predict_what_one_process_does(
    network: Network, folder: Path
) -> None:
    run_dir = alone(network, folder)
    common = (f"checkpoint={run_dir}/checkpoints/best.ckpt", "trainer.accelerator=cpu")
    found = []
    for launcher, strategy in ([sys.executable], "cpu"), (torchrun(), "ddp"):
        there = folder / strategy
        hosts = network.hosts if strategy == "ddp" else network.hosts[:1]
        for program, more in (("evaluate.py", []), ("predict.py", [f"output={there}/rows.csv"])):
            line = [*launcher, program, *common, f"strategy={strategy}", *more]
            line += ["trainer.precision=64-true", f"output_dir={there}"]
            started = [host.start(line) for host in hosts]
            assert not any(wait_all(started)), screens(started)
        (results,) = there.glob("evaluate/*/results.json")
        found.append((json.loads(results.read_text()), (there / "rows.csv").read_text()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)  # metrics add up in float32
    assert found[1][1] == found[0][1]


def by_hand(rank: int) -> dict[str, str]:
    return {"MASTER_ADDR": "nowhere", "MASTER_PORT": "29500", "NODE_RANK": str(rank)}


# Differences of one host, as arguments of ``Host.start``, and the printed message.
MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "settings": ({}, {"overrides": ["seed=9"]}, ("Rank 1 .host2.", "seed=9")),
    "code": ({}, {"seen": {CODE: "mlp.py"}}, ("Rank 1 .host2.", "differ in code")),
    "address": ({"environment": by_hand(0)}, {"environment": by_hand(1)}, ("nowhere",)),
    "disk": ({}, {"seen": {"outputs": "own"}}, ("host2 does not see",)),
    # As Debian names a machine in its own /etc/hosts.
    "name": ({"names": "127.0.1.1 host1\n"}, {}, ("on host1", "GLOO_SOCKET_IFNAME")),
}


@pytest.mark.parametrize("what", ["settings", "address", *ci("code", "name"), *slow("disk")])
def test_what_is_wrong_between_hosts_is_a_sentence_and_leaves_no_run(
    what: str, network: Network, folder: Path
) -> None:
    (folder / "mlp.py").write_text(f"{CODE.read_text()}# other\n")
    (folder / "outputs").mkdir(), (folder / "own").mkdir()
    *own, says = MISTAKES[what]
    launcher = [] if what == "address" else torchrun()
    started = []
    for host, settings in zip(network.hosts, own, strict=True):
        overrides = [
            *WORDS,
            *DDP,
            "trainer.num_nodes=2",
            *where(folder),
            *settings.get("overrides", []),
        ]
        seen = {folder / path: folder / there for path, there in settings.get("seen", {}).items()}
        others = {key: settings[key] for key in settings.keys() - {"overrides", "seen"}}
        started.append(host.start([*launcher, "train.py", *overrides], seen=seen, **others))
    statuses, screen = wait_all(started), screens(started)
    if what == "name" and statuses == [0, 0]:  # where gloo finds another address by itself
        assert "2 processes" in screen
        return
    assert 0 not in statuses, screen
    for text in says:
        assert re.search(text, screen), f"{text} is not in:\n{screen}"
    assert not re.search(OF_WORKER, screen), screen
    assert run_folders(folder) == []
    assert not list(folder.rglob("*.ckpt"))
