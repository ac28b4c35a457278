"""Two hosts train as one process does, or say in a sentence why they cannot."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests_harness.cluster.hosts import Network
from tests_harness.cluster.runs import (
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
from tests_harness.conftest import ROOT, slow

PACKAGES = Path(pytest.__file__).parents[1]
# A run that is refused has no need to wait for anything but the others' arrival.
JOIN = "join_minutes=0.2"


def check_refused(folder: Path, started: list, *says: str) -> None:
    """Fail unless all commands end with a sentence and leave no folder."""
    statuses, screen = wait_all(started), screens(started)
    assert 0 not in statuses, screen
    for text in says:
        assert re.search(text, screen), f"{text} is not in:\n{screen}"
    # Torchrun's own report of a failed worker has one; the worker's is told by its last line.
    assert not re.search(rf"rank\d\]: {re.escape(TRACEBACK)}", screen), screen
    assert run_folders(folder) == [], screen


@pytest.mark.parametrize("strategy", [DDP, DDP2], ids=["ddp", "ddp2"])
def test_two_hosts_train_what_one_process_does(
    strategy: tuple[str, ...], network: Network, folder: Path
) -> None:
    started = start_both(network, *strategy, *where(folder))
    assert wait_all(started) == [0, 0], screens(started)
    (run_dir,) = run_folders(folder)
    assert distance(run_dir, alone(network, folder)) <= 1e-12


def test_two_hosts_evaluate_and_predict_what_one_process_does(
    network: Network, folder: Path
) -> None:
    run_dir = alone(network, folder)
    common = (f"checkpoint={run_dir}/checkpoints/best.ckpt", "trainer.accelerator=cpu")
    found = []
    for launcher, words in (((), ["strategy=cpu"]), (torchrun(), ["strategy=ddp"])):
        there = folder / words[0].partition("=")[2]
        hosts = network.hosts if launcher else network.hosts[:1]
        for program, more in (
            ("evaluate.py", ["trainer.precision=64-true"]),
            ("predict.py", ["trainer.precision=64-true", f"output={there}/rows.csv"]),
        ):
            line = [
                *(launcher or [sys.executable]),
                program,
                *common,
                *words,
                *more,
                f"output_dir={there}",
            ]
            started = [host.start(line) for host in hosts]
            assert not any(wait_all(started)), screens(started)
        (results,) = there.glob("evaluate/*/results.json")
        found.append((json.loads(results.read_text()), (there / "rows.csv").read_text()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-12)
    assert found[1][1] == found[0][1]


def test_nodes_are_taken_from_torchrun(network: Network, folder: Path) -> None:
    started = start_both(network, "strategy=ddp", "trainer.devices=1", *where(folder))
    assert wait_all(started) == [0, 0], screens(started)
    assert "2 processes" in started[0].screen()


@pytest.mark.parametrize(
    ("path", "change", "says"),
    [
        pytest.param(
            ROOT / "src/project/models/mlp.py", ("", "# other\n"), "mlp.py", id="code"
        ),
        pytest.param(
            next(PACKAGES.glob("torchmetrics-*.dist-info/METADATA")),
            ("\nVersion: ", "\nVersion: 0."), "torchmetrics 0.", id="packages",
        ),
        pytest.param(ROOT / "requirements.lock", ("torch==", "torch==0."), "lock", id="lock"),
    ],
)  # fmt: skip
def test_other_code_on_a_host_is_named(
    path: Path, change: tuple[str, str], says: str, network: Network, folder: Path
) -> None:
    other = folder / path.name
    before, after = change
    text = path.read_text()
    other.write_text(text.replace(before, after, 1) if before else text + after)
    words = [*torchrun(), "train.py", *_words(folder)]
    one, two = network.hosts
    started = [one.start(words), two.start(words, seen={path: other})]
    check_refused(folder, started, "Rank 1 on host2", re.escape(says))


def _words(folder: Path, *words: str) -> list[str]:
    return [*WORDS, *DDP, *where(folder), *words]


@pytest.mark.parametrize("word", ["data.batch_size=32", "model.optimizer.lr=0.5", "seed=9"])
def test_other_settings_on_a_host_are_named(word: str, network: Network, folder: Path) -> None:
    started = start_both(network, *DDP, *where(folder), other=[word])
    check_refused(folder, started, "Rank 1 on host2", re.escape(word))


def test_what_does_not_count_may_differ_at_a_resume(network: Network, folder: Path) -> None:
    words = [*DDP, *where(folder), "resume=auto"]
    first = start_both(network, *words)
    assert wait_all(first) == [0, 0], screens(first)
    more = start_both(network, *words, "trainer.max_epochs=2", other=["data.num_workers=1"])
    assert wait_all(more) == [0, 0], screens(more)
    (run_dir,) = run_folders(folder)
    assert "epoch=1" in screens(more) or (run_dir / "results.json").exists()


@pytest.mark.parametrize("resume", [*slow("null"), "auto"])
def test_outputs_that_are_not_shared_are_told_at_the_start(
    resume: str, network: Network, folder: Path
) -> None:
    one, two = network.hosts
    shared, own = folder / "outputs", folder / "own"
    shared.mkdir(), own.mkdir()
    if resume == "auto":
        alone(network, folder)
        (folder / "alone" / "outputs" / "default").rename(shared / "default")
    before = run_folders(folder)
    words = [*torchrun(), "train.py", *_words(folder, f"resume={resume}")]
    if resume == "auto":
        words.append("trainer.max_epochs=2")
    started = [one.start(words), two.start(words, seen={shared: own})]
    statuses, screen = wait_all(started), screens(started)
    assert 0 not in statuses, screen
    assert "host2 does not see" in screen, screen
    assert run_folders(folder) == before
    assert not list(own.rglob("*.ckpt"))


@pytest.mark.parametrize("resume", [*slow("null"), "auto"])
def test_data_that_a_host_lacks_end_both_and_no_results_are_lost(
    resume: str, network: Network, folder: Path
) -> None:
    """The file is found to be absent after the processes have met, by one of them."""
    data, empty = folder / "data", folder / "empty"
    data.mkdir(), empty.mkdir()
    rows = "".join(f"{number},{number % 7}\n" for number in range(200))
    (data / "rows.csv").write_text(f"target,a\n{rows}")
    table = ["experiment=table", f"data.file={data}/rows.csv"]
    table += ["trainer.accelerator=cpu", "trainer.max_epochs=1", "name=default", "resume=auto"]
    # Not a fork of this process: polars hangs in one where it has been used before.
    launcher = [sys.executable, "-m", "torch.distributed.run", *torchrun()[1:]]
    words = [*launcher, "train.py", *table, *DDP, *where(folder)]
    one, two = network.hosts
    if resume == "auto":
        first = [host.start(words) for host in network.hosts]
        assert wait_all(first) == [0, 0], screens(first)
        words.append("trainer.max_epochs=2")
    before = {path: path.read_bytes() for path in folder.glob("outputs/*/*/results.json")}
    started = [one.start(words), two.start(words, seen={data: empty})]
    statuses, screen = wait_all(started), screens(started)
    assert 0 not in statuses, screen
    assert "rows.csv" in screen, screen
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("missing", [0, *slow(1)])
def test_rank_that_never_arrives_is_named(missing: int, network: Network, folder: Path) -> None:
    """Its host's torchrun has started something else, as a hung import is."""
    words = [[*torchrun(), "train.py", *_words(folder, JOIN)] for _ in range(2)]
    words[missing] = [*torchrun(), "--no-python", "sleep", "400"]
    started = [host.start(line) for host, line in zip(network.hosts, words, strict=True)]
    waiting = started[1 - missing]
    assert waiting.wait() != 0, waiting.screen()
    assert re.search(rf"(?i)rank {missing}\b", waiting.screen()), waiting.screen()
    assert "join_minutes" in waiting.screen()
    assert run_folders(folder) == []


def test_address_that_does_not_resolve_is_told(network: Network, folder: Path) -> None:
    words = ["train.py", *_words(folder)]
    meeting = {"MASTER_ADDR": "nowhere", "MASTER_PORT": "29500"}
    started = [
        host.start(words, environment={"NODE_RANK": str(rank), **meeting})
        for rank, host in enumerate(network.hosts)
    ]
    assert 0 not in wait_all(started, 60), screens(started)
    assert "nowhere" in screens(started)
    assert TRACEBACK not in screens(started)
    assert run_folders(folder) == []


@pytest.mark.parametrize("which", [0, *slow(1)])
def test_name_that_leads_a_host_to_itself_is_told(
    which: int, network: Network, folder: Path
) -> None:
    """As Debian names a machine in its own /etc/hosts."""
    started = [
        host.start(
            [*torchrun(), "train.py", *_words(folder)],
            names=f"127.0.1.1 {host.name}\n" if number == which else "",
        )
        for number, host in enumerate(network.hosts)
    ]
    if wait_all(started) == [0, 0]:  # where gloo finds another address by itself
        assert "2 processes" in screens(started)
        return
    host_name = network.hosts[which].name
    check_refused(folder, started, rf"on {host_name}", "GLOO_SOCKET_IFNAME")


def test_sweep_under_torchrun_is_refused_with_the_line_to_type(
    network: Network, folder: Path
) -> None:
    started = start_both(network, *where(folder), "-m", "seed=1,2")
    statuses, screen = wait_all(started), screens(started)
    assert 0 not in statuses, screen
    assert re.search(r"Use python .*-m .*seed=1,2", screen), screen
    assert not (folder / "outputs").exists()
