"""A resumed run restores Python attributes of modules, data and callbacks."""

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


def config(run_dir: Path, *words: str, module: str) -> Any:
    run_dir.mkdir(exist_ok=True)
    chosen = (f"model._target_={OWN}.{module}", "objective=val/loss", "mode=min")
    off = ("callbacks.learning_rate=null", "test=false")
    return compose("train", [*COMMON, *chosen, *off, *words, f"run_dir={run_dir}"])


def go_on(reference: Path, step: str, *words: str, module: str) -> Path:
    """Resume from a step of a run that has ended, and return the folder."""
    cfg = config(reference.with_name("run"), *words, module=module)
    run_dir = Path(cfg.run_dir)
    shutil.rmtree(run_dir)
    shutil.copytree(reference, run_dir, symlinks=True)
    leave_at(run_dir, int(step.rpartition("_")[2]))
    cfg.resume = str(run_dir / "checkpoints" / f"{step}.ckpt")
    train(cfg)
    return run_dir


def lines_of(run_dir: Path, text: str) -> list[str]:
    return [line for line in (run_dir / "run.log").read_text().splitlines() if text in line]


def test_what_cannot_be_kept_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "join_first", ", ".join)
    words = (f"data._target_={OWN}.MovingData",)
    train(config(tmp_path / "run", *words, module="CannotBeKept"))
    reference = (tmp_path / "run").rename(tmp_path / "reference")
    (line,) = lines_of(reference, "Checkpoints lack")
    for name in ("function", "stream", "rng", "holder.meter ", "meters ", "teacher", "nested"):
        assert f"module.{name}" in line
    assert "batch sampler 0.epochs" in line
    for name in ("lock", "unused", "helper"):
        assert f"module.{name}" not in line
    last = contents(reference)["last.ckpt"]
    module = kept.CannotBeKept()
    attributes.restore_numbers(module, last["changed_attributes"], "cpu")  # as for an evaluation
    assert module.tally.sum == last["global_step"]
    run_dir = go_on(reference, "step_7", *words, module="CannotBeKept")
    (kept_of_data,) = contents(run_dir)["last.ckpt"]["changed_attributes"]["each"]
    # Settings of the new command stay.
    assert {name for owner, name in kept_of_data if owner == "data"} == {"noise_level"}
    (line,) = lines_of(run_dir, "The resumed run did not restore")
    assert "module.stream" in line
    assert "data.noise_level (changes while a batch is read or moved)" in line


def test_structure_that_no_run_can_go_on_with_is_named_at_that_checkpoint(tmp_path: Path) -> None:
    train(config(tmp_path / "run", "trainer.num_sanity_val_steps=2", module="Exchanges"))
    (line,) = lines_of(tmp_path / "run", "has added, removed or replaced")
    assert "replaced extra.bias, extra.weight, optimizer 0. No run can resume from" in line


@pytest.mark.ci
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
    for text in ("The resumed run did not restore", "Checkpoints lack"):
        assert lines_of(run_dir, text) == []

    alone = tmp_path / "alone" / "run" / run_dir.name
    leave_at(alone, 8)
    run_of([f"resume={alone}", "trainer.max_epochs=4"], "cpu", tmp_path / "alone")
    (line,) = lines_of(alone, "The resumed run did not restore")
    for name in ("losses", "all", "offset"):
        assert f"module.{name} (differed between 2 ranks)" in line
    assert "module.world (a hook at the start has set another value)" in line
    assert "module.both (may depend on the number of ranks, which has changed)" in line
    (kept_now,) = contents(alone)["last.ckpt"]["changed_attributes"]["each"]
    assert kept_now["module", "num_steps"] == 20
