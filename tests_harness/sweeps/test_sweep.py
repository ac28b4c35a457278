"""A sweep as a user types it, with runs that train."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.command import run_folder, sweep_words
from tests_harness.conftest import ROOT, slow
from tests_harness.faults.fork_server import command

TINY = ("data=synthetic", "model=mlp", "strategy=cpu", "trainer.max_epochs=1", "watch=none")
TINY += ("notes=${name}",)  # which only a run can tell
GRID = ("model.optimizer.lr=0.001,0.01", "seed=1,2")


def only(folder: Path) -> Path:
    (child,) = folder.iterdir()
    return child


def sweeps(folder: Path) -> list[Path]:
    return sorted(folder.glob("sweeps/*/*"))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a grid of four runs, two at a time."""
    folder = tmp_path_factory.mktemp("swept")
    words = (*TINY, *GRID, "sweep.num_parallel=2", f"output_dir={folder}")
    result = command("train.py", "-m", *words, environment={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 jobs in" in result.stdout
    assert "4 finished. best so far: job" in result.stdout
    return only(only(folder / "sweeps"))


def test_grid_is_the_single_runs_in_hydras_order(swept: Path, tmp_path: Path) -> None:
    words = [run_folder.load_words(swept / str(number))[-3:-1] for number in range(4)]
    rates = ("model.optimizer.lr=0.001", "model.optimizer.lr=0.01")
    assert words == [[rate, f"seed={seed}"] for rate in rates for seed in (1, 2)]
    for number in (0, 3):
        single = tmp_path / str(number)
        result = command(
            *("train.py", *TINY, *words[number], f"output_dir={single}"),
            environment={"OMP_NUM_THREADS": "1"},
        )
        assert result.returncode == 0, result.stderr
        run_dir = only(only(single))
        for name in ("results.json", "metrics.csv"):
            assert (run_dir / name).read_bytes() == (swept / str(number) / name).read_bytes()
        ours, theirs = (run_folder.load_config(folder) for folder in (run_dir, swept / str(number)))
        for cfg in (ours, theirs):
            cfg.run_dir = cfg.output_dir = None
        assert ours == theirs


def again(folder: Path, *words: str) -> tuple[int, str]:
    result = command("train.py", "-m", *words, f"output_dir={folder}")
    return result.returncode, result.stdout + result.stderr


def test_same_command_again_skips_what_has_finished(swept: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in swept.glob("*/results.json")}
    status, said = again(swept.parents[2], "resume=auto", *TINY, *GRID)
    assert status == 0, said
    assert "0 to run" in said
    assert {path: path.stat().st_mtime_ns for path in swept.glob("*/results.json")} == before
    status, said = again(swept.parents[2], f"resume={swept}")
    assert status == 0, said
    assert "0 to run" in said
    assert sweeps(swept.parents[2]) == [swept]


@pytest.mark.parametrize("named", [True, False])
def test_other_words_are_refused_in_a_line(named: bool, swept: Path) -> None:
    wanted = f"resume={swept}" if named else "resume=auto"
    status, said = again(swept.parents[2], wanted, *TINY, GRID[0], "seed=1,2,3")
    assert status == 1
    assert said.startswith(f"The sweep in {swept} is another one: it has seed=1,2, and this")
    assert sweeps(swept.parents[2]) == [swept]


def test_failed_job_keeps_its_folder_with_the_reason(tmp_path: Path) -> None:
    words = (*TINY, "model.optimizer.lr=-1,0.01")
    status, said = again(tmp_path, *words)
    assert status == 1
    (sweep,) = sweeps(tmp_path)
    assert "job 0 failed" in said
    assert f"{sweep / '0'}: failed, model.optimizer: Invalid learning rate: -1" in said
    assert f"Go on with: python train.py -m resume={sweep} sweep.retry_failed=true" in said
    assert "Invalid learning rate: -1" in (sweep / "0" / "screen.log").read_text()
    assert (sweep / "1" / "results.json").exists()
    status, said = again(tmp_path, f"resume={sweep}", "sweep.retry_failed=true")
    assert status == 1
    assert "1 to run" in said
    assert (sweep / "0" / "screen.log").read_text().count("run folder") == 2


def test_job_that_cannot_be_composed_fails_alone(tmp_path: Path) -> None:
    status, said = again(tmp_path, *TINY, "seed=x,1")
    assert status == 1
    (sweep,) = sweeps(tmp_path)
    assert f"{sweep / '0'}: failed, seed=x: seed takes a number" in said
    assert (sweep / "1" / "results.json").exists()


def test_star_leaves_out_what_is_part_of_other_files() -> None:
    (override,) = sweep_words.parsed(ROOT / "conf", ["model=glob(*)"])
    chosen = {word.partition("=")[2] for word in sweep_words.values_of(override)}
    there = {path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")}
    assert chosen == {name for name in there if not name.startswith("_")}


def test_job_that_is_asked_for_twice_is_one() -> None:
    overrides = sweep_words.parsed(ROOT / "conf", ["seed=1,2,1", "model=mlp,mlp"])
    assert sweep_words.combinations(overrides) == [["seed=1", "model=mlp"], ["seed=2", "model=mlp"]]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("-m", "trainer.devcies=1,2"), "trainer.devices"),
        (("-m", "seed=1,2", "model.optimizer.lr=interval(0,1)"), "sweep=optuna"),
        (("-m", "seed=1,2", "sweep.num_parallel=0"), "sweep.num_parallel=0 must be"),
        (("-m", "seed=1,2", "resume=nowhere"), "there is no sweep"),
        (("-m", "seed=1,2", "debug=profile,profle"), "Did you mean debug=profile"),
        (("-m", "seed=x,1", "gpus=visible,visibl"), "Did you mean gpus=visible"),
        (("-m", "resume=auto", "trainer=default,null"), "there is no conf/trainer/null.yaml"),
        (("-m", "seed=1,2", "hydra/launcher=basic", "sweep.num_parallel=2"), "Leave out one"),
        (("seed=1", "sweep.num_parallel=2"), "train.py -m sweep.num_parallel=2"),
    ],
)
def test_mistake_leaves_nothing(words: tuple[str, ...], hint: str, tmp_path: Path) -> None:
    result = command("train.py", *words, *TINY, f"output_dir={tmp_path / 'out'}")
    assert result.returncode == 1
    assert hint in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.yaml"))


def test_job_of_two_processes_runs_once(tmp_path: Path) -> None:
    words = (*TINY[:2], *TINY[3:], "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    status, said = again(tmp_path, *words, "seed=1,2")
    assert status == 0, said
    (sweep,) = sweeps(tmp_path)
    for number in range(2):
        log = (sweep / str(number) / "screen.log").read_text()
        assert log.count("run folder") == 1
        assert "2 processes" in log
        assert json.loads((sweep / str(number) / "results.json").read_text())
    assert not [path for path in tmp_path.rglob("config.yaml") if path.parents[1] != sweep]


def test_study_makes_up_the_settings_of_runs(tmp_path: Path) -> None:
    words = (*TINY, "sweep=optuna", "model.optimizer.lr=tag(log,interval(1e-4,1e-2))", "seed=1,2")
    status, said = again(tmp_path, *words, "sweep.num_trials=2")
    assert status == 0, said
    (sweep,) = sweeps(tmp_path)
    assert (sweep / "study.db").exists()
    rates = [run_folder.load_config(sweep / str(n)).model.optimizer.lr for n in range(2)]
    assert len({*rates}) == 2
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    status, said = again(tmp_path, f"resume={sweep}", "sweep.num_trials=3")
    assert status == 0, said
    assert "3 jobs in" in said
    assert len([*sweep.glob("*/results.json")]) == 3


def test_ctrl_c_saves_and_the_sweep_goes_on(tmp_path: Path) -> None:
    """A real run in a real process: it has a checkpoint, and goes on from it."""
    words = [*TINY[:3], "watch=none", "trainer.max_epochs=100", "seed=1,2"]
    line = [sys.executable, "train.py", "-m", *words, f"output_dir={tmp_path}"]
    driver = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 200
    while not [*tmp_path.glob("sweeps/*/*/0/metrics.csv")] and time.monotonic() < end:
        time.sleep(0.1)
    driver.send_signal(signal.SIGINT)
    said, _ = driver.communicate(timeout=100)
    assert driver.returncode == 128 + signal.SIGINT
    (sweep,) = sweeps(tmp_path)
    assert f"Go on with: python train.py -m resume={sweep}" in said
    assert [*(sweep / "0" / "checkpoints").glob("step_*.ckpt")]
    assert not (sweep / "1").exists()
    status, said = again(tmp_path, f"resume={sweep}")
    assert status == 0, said
    assert "goes on from " in (sweep / "0" / "screen.log").read_text()
    assert {path.parent.name for path in sweep.glob("*/results.json")} == {"0", "1"}


@pytest.mark.parametrize("kind", ["grid", *slow("study")])
def test_kills_change_no_result(kind: str, tmp_path: Path) -> None:
    """Two of the kills of ``python -m tests_harness.sweeps``."""
    figures = tmp_path / "figures.json"
    words = ("-W", "ignore", "-m", "tests_harness.sweeps", kind, "--num", "2", "--json", figures)
    result = command(*words, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(json.loads(figures.read_text())) == 1
