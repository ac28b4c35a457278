"""A sweep as a user types it, with runs that train."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from harness.command import run_folder
from tests.faults import fork_server
from tests.faults.fork_server import command
from tests.refusals import refusal

TINY = ("data=synthetic", "model=mlp", "strategy=cpu", "trainer.max_epochs=1", "watch=none")
TINY += ("data.num_train=640", "notes=${name}")  # which only a run can tell
GRID = ("model.optimizer.lr=0.001,0.01", "seed=1,2")


def only(folder: Path) -> Path:
    (child,) = folder.iterdir()
    return child


def sweeps(folder: Path) -> list[Path]:
    return sorted(folder.glob("sweeps/*/*"))


def again(folder: Path, *words: str) -> tuple[int, str]:
    result = command("train.py", "-m", *words, f"output_dir={folder}")
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a grid of four runs, two at a time."""
    folder = tmp_path_factory.mktemp("swept")
    status, said = again(folder, *TINY, *GRID, "sweep.num_parallel=2")
    assert status == 0, said
    assert "4 jobs in" in said
    assert said.rstrip().endswith("4 finished")
    return only(only(folder / "sweeps"))


def test_grid_is_the_single_runs_in_hydras_order(swept: Path, tmp_path: Path) -> None:
    words = [run_folder.load_words(swept / str(number))[-3:-1] for number in range(4)]
    rates = ("model.optimizer.lr=0.001", "model.optimizer.lr=0.01")
    assert words == [[rate, f"seed={seed}"] for rate in rates for seed in (1, 2)]
    result = command("train.py", *TINY, *words[3], f"output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    run_dir = only(only(tmp_path))
    for name in ("results.json", "metrics.csv"):
        assert (run_dir / name).read_bytes() == (swept / "3" / name).read_bytes()
    ours, theirs = (run_folder.load_config(folder) for folder in (run_dir, swept / "3"))
    for cfg in (ours, theirs):
        cfg.run_dir = cfg.output_dir = None
    assert ours == theirs


def test_same_words_go_on_with_a_sweep_and_others_are_refused(swept: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in swept.glob("*/results.json")}
    for words in (("resume=auto", *TINY, *GRID), (f"resume={swept}",)):
        status, said = again(swept.parents[2], *words)
        assert status == 0, said
        assert "0 to run" in said
    assert {path: path.stat().st_mtime_ns for path in swept.glob("*/results.json")} == before
    place = f"output_dir={swept.parents[2]}"
    said = refusal("-m", f"resume={swept}", *TINY, GRID[0], "seed=1,2,3", place)
    assert said.startswith(f"resume={swept} goes on with ")
    assert said.partition("\n")[0].endswith("seed=1,2,3.")
    assert sweeps(swept.parents[2]) == [swept]


def test_failed_jobs_keep_their_folders_with_the_reason(tmp_path: Path) -> None:
    """Also one that cannot be composed."""
    status, said = again(tmp_path, *TINY, "model.optimizer.lr=-1,0.01,fast")
    assert status == 1
    (sweep,) = sweeps(tmp_path)
    assert "job 0 failed" in said
    assert f"{sweep / '0'}: failed, model.optimizer: Invalid learning rate: -1" in said
    assert f"{sweep / '2'}: failed, model.optimizer.lr=fast: model.optimizer.lr takes a n" in said
    assert f"Go on with: python train.py -m resume={sweep}\n" in said
    assert "Invalid learning rate: -1" in (sweep / "0" / "screen.log").read_text()
    assert (sweep / "1" / "results.json").exists()
    status, said = again(tmp_path, f"resume={sweep}")
    assert status == 1
    assert "2 to run" in said
    assert (sweep / "0" / "screen.log").read_text().count("run folder") == 2


RATE = "model.optimizer.lr=tag(log,interval(1e-4,1e-2))"
MISTAKES = {
    "-m trainer.devcies=1,2": "Did you mean trainer.devices?",
    "-m seed=1,2 model.optimizer.lr=interval(0,1)": "sweep=optuna",
    "-m seed=1,2 sweep.num_parallel=0": "sweep.num_parallel=0 must be",
    "-m seed=1,2 resume=nowhere": "there is no sweep",
    "-m sweep=optuna seed=1": "sweep=optuna has nothing to choose",
    f"-m sweep=optuna {RATE} +sweep.sampler.no=1": "sweep.sampler=optuna",
    f"-m sweep=optuna {RATE} sweep.num_trials=0": "must be a whole number, 1 or more",
    "-m seed=1,2 hydra/launcher=slurm": "under Slurm see harness/docs/cluster.md",
    "-m seed=1,2 hydra/sweeper=optuna": "sweeps are python train.py -m",
    "-m seed=1,2 hydra.callbacks.a._target_=x": "callbacks are Lightning's",
    "-m seed=1,2 --cfg job": "Leave out one",
    "seed=1 sweep.num_parallel=2": "train.py -m sweep.num_parallel=2",
}


def test_mistake_leaves_nothing(tmp_path: Path) -> None:
    for words, hint in MISTAKES.items():
        said = refusal(*words.split(), *TINY, f"output_dir={tmp_path / 'out'}")
        assert hint in said, words
        assert len(said.splitlines()) <= 2, said
        assert not (tmp_path / "out").exists(), words
    assert "-m is for trainings" in refusal("-m", "checkpoint=a,b", task="evaluate")


def test_study_makes_up_the_settings_and_goes_on_for_more(tmp_path: Path) -> None:
    status, said = again(tmp_path, *TINY, "sweep=optuna", RATE, "sweep.num_trials=1")
    assert status == 0, said
    (sweep,) = sweeps(tmp_path)
    status, said = again(tmp_path, f"resume={sweep}", "sweep.num_trials=2", "seed=2")
    assert status == 1
    assert " goes on with " in said
    status, said = again(tmp_path, f"resume={sweep}", "sweep.num_trials=2")
    assert status == 0, said
    assert "2 jobs in" in said
    assert len([*sweep.glob("*/results.json")]) == 2
    rates = {run_folder.load_config(sweep / str(n)).model.optimizer.lr for n in range(2)}
    assert len(rates) == 2
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)


def started(folder: Path, *words: str) -> fork_server.Started:
    return fork_server.start(["-m", *words, f"output_dir={folder}"], folder / "log")


def test_ctrl_c_saves_and_the_sweep_goes_on(tmp_path: Path) -> None:
    driver = started(tmp_path, *TINY, "trainer.max_epochs=60", "seed=1,2")
    end = time.monotonic() + 200
    while not [*tmp_path.glob("sweeps/*/*/0/metrics.csv")] and time.monotonic() < end:
        time.sleep(0.02)
    driver.send_signal(signal.SIGINT)
    assert driver.wait() == 128 + signal.SIGINT
    (sweep,) = sweeps(tmp_path)
    assert f"Go on with: python train.py -m resume={sweep}" in (tmp_path / "log").read_text()
    assert [*(sweep / "0" / "checkpoints").glob("step_*.ckpt")]
    assert not (sweep / "1").exists()
    status, said = again(tmp_path, f"resume={sweep}")
    assert status == 0, said
    assert "goes on from " in (sweep / "0" / "screen.log").read_text()
    assert {path.parent.name for path in sweep.glob("*/results.json")} == {"0", "1"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grid", "study"])
def test_kills_change_no_result(kind: str, tmp_path: Path) -> None:
    """kill -9 of the driver or of a job; each job is then what a single run of its words is."""
    words = [*TINY, "trainer.max_epochs=5", "checkpoint.every_n_steps=3", "sweep.num_parallel=2"]
    words += [*GRID] if kind == "grid" else ["sweep=optuna", "sweep.num_trials=4", RATE]
    draw, status = random.Random(1), 1
    for num_starts in range(20):
        driver = started(tmp_path, *words, "resume=auto")
        end = time.monotonic() + draw.random() * 6
        while driver.poll() is None and (time.monotonic() < end or num_starts >= 6):
            time.sleep(0.01)
        if driver.poll() is None:
            children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
            is_job = children and draw.random() < 0.5
            os.kill(int(draw.choice(children)) if is_job else driver.pid, signal.SIGKILL)
        if (status := driver.wait()) == 0:
            break
    assert status == 0, (tmp_path / "log").read_text()[-2000:]
    # A driver that was killed before it wrote its words has left a folder that is no sweep.
    (sweep,) = [place for place in sweeps(tmp_path) if (place / "overrides.yaml").exists()]
    for number in range(4):
        job = sweep / str(number)
        first = [word for word in run_folder.load_words(job) if not word.startswith("output_dir=")]
        place = tmp_path / f"single_{number}"
        result = command("train.py", *first, f"output_dir={place}")
        assert result.returncode == 0, result.stderr
        assert json.loads((job / "results.json").read_text())
        for name in ("results.json", "metrics.csv"):
            assert (job / name).read_bytes() == (only(only(place)) / name).read_bytes()
