"""Two hosts train as one process does, or say in a sentence why they cannot."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Network
from tests.cluster.runs import (
    DDP,
    DDP2,
    TRACEBACK,
    WORDS,
    alone,
    distance,
    run_folders,
    screens,
    start_both,
    torchrun,
    wait_all,
    where,
)
from tests.conftest import ROOT


def check_refused(folder: Path, started: list, *says: str) -> None:
    """Fail unless all commands end with a sentence and leave no folder."""
    statuses, screen = wait_all(started), screens(started)
    assert 0 not in statuses, screen
    for text in says:
        assert re.search(text, screen), f"{text} is not in:\n{screen}"
    # Torchrun's own report of a failed worker has one; the worker's is told by its last line.
    assert not re.search(rf"rank\d\]: {re.escape(TRACEBACK)}", screen), screen
    assert run_folders(folder) == [], screen


def test_two_hosts_train_and_resume_what_one_process_does(network: Network, folder: Path) -> None:
    """What does not count may differ between them, and nodes are taken from torchrun."""
    words = ["strategy=ddp", "trainer.devices=1", *where(folder)]
    first = start_both(network, *words)
    assert wait_all(first) == [0, 0], screens(first)
    assert "2 processes" in first[0].screen()
    (run_dir,) = run_folders(folder)
    assert distance(run_dir, alone(network, folder)) <= 1e-12
    further = ("trainer.max_epochs=2", "resume=auto")
    more = start_both(network, *words, *further, other=["data.num_workers=1"])
    assert wait_all(more) == [0, 0], screens(more)
    assert run_folders(folder) == [run_dir]
    assert distance(run_dir, alone(network, folder, *further)) <= 1e-12


@pytest.mark.slow
def test_two_hosts_train_with_two_devices_each(network: Network, folder: Path) -> None:
    """As one process of each host, and as two."""
    ddp = [word.replace("devices=1", "devices=2") for word in DDP]
    for words, num_processes in ((DDP2, 1), (ddp, 2)):
        there = folder / str(num_processes)
        launcher = torchrun(num_processes=num_processes)
        started = start_both(network, *words, *where(there), launcher=launcher)
        assert wait_all(started) == [0, 0], screens(started)
        (run_dir,) = run_folders(there)
        assert distance(run_dir, alone(network, there)) <= 1e-12


@pytest.mark.slow
def test_two_hosts_evaluate_and_predict_what_one_process_does(
    network: Network, folder: Path
) -> None:
    run_dir = alone(network, folder)
    common = (f"checkpoint={run_dir}/checkpoints/best.ckpt", "trainer.accelerator=cpu")
    found = []
    for launcher, strategy in ((), "cpu"), (torchrun(), "ddp"):
        there = folder / strategy
        hosts = network.hosts if launcher else network.hosts[:1]
        for program, more in (("evaluate.py", []), ("predict.py", [f"output={there}/rows.csv"])):
            line = [*(launcher or [sys.executable]), program, *common, f"strategy={strategy}"]
            line += [*more, "trainer.precision=64-true", f"output_dir={there}"]
            started = [host.start(line) for host in hosts]
            assert not any(wait_all(started)), screens(started)
        (results,) = there.glob("evaluate/*/results.json")
        found.append((json.loads(results.read_text()), (there / "rows.csv").read_text()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)  # metrics add up in float32
    assert found[1][1] == found[0][1]


def _words(folder: Path, *words: str) -> list[str]:
    return [*WORDS, *DDP, *where(folder), *words]


def test_other_settings_and_code_on_a_host_are_named(network: Network, folder: Path) -> None:
    code = ROOT / "src/small/models.py"
    (folder / "mlp.py").write_text(f"{code.read_text()}# other\n")
    words = [*torchrun(), "train.py", *_words(folder)]
    one, two = network.hosts
    started = [one.start(words), two.start([*words, "seed=9"])]
    check_refused(folder, started, "Rank 1 on host2", "seed=9")
    started = [one.start(words), two.start(words, seen={code: folder / "mlp.py"})]
    check_refused(folder, started, "Rank 1 on host2", "another code")


@pytest.mark.slow
def test_outputs_that_are_not_shared_are_told_at_the_start(network: Network, folder: Path) -> None:
    one, two = network.hosts
    shared, own = folder / "outputs", folder / "own"
    shared.mkdir(), own.mkdir()
    words = [*torchrun(), "train.py", *_words(folder)]
    started = [one.start(words), two.start(words, seen={shared: own})]
    statuses, screen = wait_all(started), screens(started)
    assert 0 not in statuses, screen
    assert "host2 does not see" in screen, screen
    assert run_folders(folder) == []
    assert not list(own.rglob("*.ckpt"))


def test_address_that_does_not_resolve_is_told(network: Network, folder: Path) -> None:
    meeting = {"MASTER_ADDR": "nowhere", "MASTER_PORT": "29500"}
    started = [
        host.start(["train.py", *_words(folder)], environment={"NODE_RANK": str(rank), **meeting})
        for rank, host in enumerate(network.hosts)
    ]
    check_refused(folder, started, "nowhere")


def test_name_that_leads_a_host_to_itself_is_told(network: Network, folder: Path) -> None:
    """As Debian names a machine in its own /etc/hosts."""
    started = [
        host.start(
            [*torchrun(), "train.py", *_words(folder)],
            names=f"127.0.1.1 {host.name}\n" if number == 0 else "",
        )
        for number, host in enumerate(network.hosts)
    ]
    if wait_all(started) == [0, 0]:  # where gloo finds another address by itself
        assert "2 processes" in screens(started)
        return
    check_refused(folder, started, rf"on {network.hosts[0].name}", "GLOO_SOCKET_IFNAME")
