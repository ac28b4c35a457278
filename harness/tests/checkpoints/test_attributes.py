"""Python attributes of modules, data and callbacks go on where they were."""

import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import attributes
from harness.command.compose import compose
from tests.checkpoints import kept
from tests.faults.resume_sweep import COMMON, train
from tests.faults.run_folder import contents, differences, leave_at
from tests.strategy_runs import run_of

OWN = f"{kept.__name__}"
EVERYTHING = (
    f"data._target_={OWN}.Data",
    f"+callbacks.recorder._target_={OWN}.Recorder",
    "trainer.num_sanity_val_steps=2",
    "trainer.max_epochs=2",
)


def config(run_dir: Path, *words: str, module: str = "Everything") -> Any:
    run_dir.mkdir(exist_ok=True)
    chosen = (f"model._target_={OWN}.{module}", "objective=val/loss", "mode=min")
    off = ("callbacks.learning_rate=null", "test=false")
    return compose("train", [*COMMON, *chosen, *off, *words, f"run_dir={run_dir}"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of 5 steps in each of 2 epochs, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("reference")
    train(config(folder / "run", *EVERYTHING))
    (folder / "run").rename(folder / "reference")  # what goes on with it is where it was
    return folder / "reference"


def go_on(reference: Path, step: str, *words: str, module: str = "Everything") -> Path:
    """Go on from a step of a run that has ended; the folder of that."""
    cfg = config(reference.with_name("run"), *words, module=module)
    run_dir = Path(cfg.run_dir)
    shutil.rmtree(run_dir)
    shutil.copytree(reference, run_dir, symlinks=True)
    leave_at(run_dir, int(step.rpartition("_")[2]))
    cfg.resume = str(run_dir / "checkpoints" / f"{step}.ckpt")
    train(cfg)
    return run_dir


def states(run_dir: Path) -> dict[str, list[str]]:
    """What each habit has come to, row by row."""
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name.startswith("state/")]
    return {name.partition("/")[2]: [row[name] for row in rows] for name in names}


def lines_of(run_dir: Path, text: str) -> list[str]:
    return [line for line in (run_dir / "run.log").read_text().splitlines() if text in line]


def test_run_goes_on_with_every_attribute_of_module_data_and_callbacks(reference: Path) -> None:
    run_dir = go_on(reference, "step_7", *EVERYTHING)
    assert states(run_dir) == states(reference)
    assert differences(contents(reference), contents(run_dir)) == []
    assert lines_of(run_dir, "These are not as they were") == []


def test_only_what_training_has_changed_is_put_back_where_an_epoch_begins(reference: Path) -> None:
    """Settings of the new command stay. Lightning calls that epoch's hooks itself."""
    run_dir = go_on(reference, "step_5", *EVERYTHING)
    assert states(run_dir) == states(reference)
    found = contents(run_dir)["last.ckpt"]["changed_attributes"]
    assert {name for owner, name in found["each"][0] if owner == "data"} == {"noise_level"}


def test_what_cannot_be_kept_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "few", ", ".join)
    words = (f"data._target_={OWN}.MovingData",)
    train(config(tmp_path / "run", *words, module="CannotBeKept"))
    reference = (tmp_path / "run").rename(tmp_path / "reference")
    (line,) = lines_of(reference, "Checkpoints lack")
    for name in ("function", "stream", "rng", "meter ", "meters ", "teacher", "nested"):
        assert f"module.{name}" in line
    for name in ("lock", "unused", "helper"):
        assert f"module.{name}" not in line
    run_dir = go_on(reference, "step_7", *words, module="CannotBeKept")
    (line,) = lines_of(run_dir, "These are not as they were")
    assert "module.stream" in line
    assert "data.noise_level (changes while a batch is read or moved)" in line


def test_structure_that_no_run_can_go_on_with_is_named_at_that_checkpoint(tmp_path: Path) -> None:
    train(config(tmp_path / "run", "trainer.num_sanity_val_steps=2", module="Exchanges"))
    (line,) = lines_of(tmp_path / "run", "has added, removed or exchanged")
    assert "exchanged extra.bias, extra.weight, optimizer 0: no run can go on from" in line


def test_batch_sampler_goes_on_counting_its_epochs_and_a_list_of_it_is_named(
    tmp_path: Path,
) -> None:
    words = (f"data._target_={OWN}.CountingData",)
    train(config(tmp_path / "run", *words, module="Module"))
    reference = (tmp_path / "run").rename(tmp_path / "reference")
    (line,) = lines_of(reference, "Checkpoints lack")
    assert "batch sampler 0.epochs" in line
    for step in ("step_5", "step_7"):
        run_dir = go_on(reference, step, *words, module="Module")
        found = (contents(folder)["last.ckpt"]["state_dict"] for folder in (reference, run_dir))
        assert differences(*found) == []
        assert lines_of(run_dir, "draws other batches") == []


def test_each_process_goes_on_with_its_own_and_one_with_what_two_had_alike(tmp_path: Path) -> None:
    words = ["test=false", "name=run", "data=synthetic", "data.batch_size=300", "data.noise=0.1"]
    words += ["checkpoint.every_n_steps=1", "checkpoint.num_kept=1000"]
    words += [f"model._target_={OWN}.PerProcess", "objective=val/loss", "mode=min"]
    run_dir = run_of(words, "ddp(2)", tmp_path)
    expected = contents(run_dir)
    shutil.copytree(tmp_path / "run", tmp_path / "alone" / "run", symlinks=True)
    leave_at(run_dir, 8)
    run_of([f"resume={run_dir}"], "ddp(2)", tmp_path)
    assert differences(expected, contents(run_dir)) == []
    for text in ("These are not as they were", "Checkpoints lack"):
        assert lines_of(run_dir, text) == []

    alone = tmp_path / "alone" / "run" / run_dir.name
    leave_at(alone, 8)
    run_of([f"resume={alone}", "trainer.max_epochs=4"], "cpu", tmp_path / "alone")
    (line,) = lines_of(alone, "These are not as they were")
    for name in ("losses", "all", "offset"):
        assert f"module.{name} (differed between 2 processes)" in line
    assert "module.world (a hook at the start has set another value)" in line
    assert "module.both (equal in all processes, of which there were others)" in line
    (kept_now,) = contents(alone)["last.ckpt"]["changed_attributes"]["each"]
    assert kept_now["module", "num_steps"] == 20
