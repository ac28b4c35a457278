"""Python attributes of modules, data and callbacks go on where they were."""

import io
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.checkpoints import owners
from harness.checkpoints.attributes import Attributes
from harness.checkpoints.lookup import by_step, link_newest
from harness.checkpoints.packing import Packer
from harness.checkpoints.placing import LostError, Placer
from harness.command.compose import compose
from harness.upstream import resume_states
from tests_harness.checkpoints import kept
from tests_harness.faults.resume_sweep import COMMON, train
from tests_harness.faults.run_folder import contents, differences
from tests_harness.strategy_runs import execute

KINDS = sorted(
    name
    for name, kind in vars(kept).items()
    if isinstance(kind, type)
    and issubclass(kind, kept.Module)
    and name not in ("Module", "CannotBeKept", "PerProcess", "Harder", "HeldTwice")
)
OWN = f"{kept.__name__}"
BESIDE = {
    "callback": (f"+callbacks.recorder._target_={OWN}.Recorder",),
    "data": (
        f"data._target_={OWN}.Data",
        f"+callbacks.recorder._target_={OWN}.Recorder",
        f"model._target_={OWN}.Harder",
    ),
}
STEPS = ("step_2", "step_9")  # 5 in each of 3 epochs


def config(run_dir: Path, *words: str, module: str = "Module") -> Any:
    chosen = (f"model._target_={OWN}.{module}", "objective=val/loss", "mode=min")
    off = ("callbacks.learning_rate=null", "test=false")
    return compose("train", [*COMMON, *chosen, *off, *words, f"run_dir={run_dir}"])


def resumed(cfg: Any, reference: Path, step: str) -> Any:
    """The config of a run that goes on from a step of another one that has ended."""
    run_dir = Path(cfg.run_dir)
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(reference, run_dir, symlinks=True)
    (mine,) = (path for path in by_step(run_dir / "checkpoints") if path.stem == step)
    for later in by_step(mine.parent):
        if int(later.stem.rpartition("_")[2]) > int(step.rpartition("_")[2]):
            later.unlink()
    link_newest(mine)
    cfg.resume = str(mine)
    return cfg


def apart(folder: Path, *words: str, module: str = "Module") -> dict[str, list[str]]:
    """What differs of a run that went on, by the step at which it was left."""
    run_dir, reference = folder / "run", folder / "reference"
    run_dir.mkdir()
    cfg = config(run_dir, *words, module=module)
    train(cfg)
    run_dir.rename(reference)
    expected, found = contents(reference), {}
    for step in STEPS:
        train(resumed(cfg, reference, step))
        found[step] = differences(expected, contents(run_dir))
        assert "as in a run that begins" not in (run_dir / "run.log").read_text()
    assert "begins anew" not in (reference / "run.log").read_text()
    return {step: differing for step, differing in found.items() if differing}


@pytest.mark.parametrize("kind", KINDS)
def test_run_goes_on_with_the_attributes_of_its_module(kind: str, tmp_path: Path) -> None:
    assert apart(tmp_path, module=kind) == {}


@pytest.mark.parametrize("name", BESIDE)
def test_run_goes_on_with_the_attributes_of_data_and_callbacks(name: str, tmp_path: Path) -> None:
    assert apart(tmp_path, *BESIDE[name]) == {}


def test_what_cannot_be_kept_is_told_once_with_the_line_that_sets_it(tmp_path: Path) -> None:
    limit = "checkpoint.attribute_megabytes=1"
    (tmp_path / "run").mkdir()
    cfg = config(tmp_path / "run", limit, module="CannotBeKept")
    train(cfg)
    (tmp_path / "run").rename(tmp_path / "reference")
    said = (tmp_path / "reference" / "run.log").read_text()
    assert said.count("Checkpoints lack") == 1
    line = next(line for line in said.splitlines() if "Checkpoints lack" in line)
    for name in ("function", "large", "stream", "zone", "record"):
        assert f"CannotBeKept.{name}, set in tests_harness/checkpoints/kept.py:" in line
    assert "more than 1 MB" in line
    assert "an iterator" in line
    for name in ("lock", "partial", "path"):
        assert f"CannotBeKept.{name}" not in said
    train(resumed(cfg, tmp_path / "reference", "step_7"))
    said = (tmp_path / "run" / "run.log").read_text()
    line = next(line for line in said.splitlines() if "as in a run that begins" in line)
    assert "CannotBeKept.stream" in line
    # The functions of what training has made are not known.
    assert "CannotBeKept.nested" in said.rpartition("All 6 of these")[2]


def test_what_changes_while_a_batch_is_moved_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    cfg = config(tmp_path / "run", f"data._target_={OWN}.MovingData")
    train(cfg)
    (tmp_path / "run").rename(tmp_path / "reference")
    train(resumed(cfg, tmp_path / "reference", "step_7"))
    said = (tmp_path / "run" / "run.log").read_text()
    assert "MovingData.noise_level" in said
    assert "changes while a batch is read or moved" in said


def test_what_is_the_same_is_not_told_to_change_while_a_batch_is_moved(tmp_path: Path) -> None:
    """Tensors that two attributes hold are packed otherwise, whichever of them comes first."""
    (tmp_path / "run").mkdir()
    cfg = config(tmp_path / "run", module="HeldTwice")
    train(cfg)
    (tmp_path / "run").rename(tmp_path / "reference")
    train(resumed(cfg, tmp_path / "reference", "step_9"))
    assert "The first batch was read" not in (tmp_path / "run" / "run.log").read_text()


def test_many_attributes_are_cut_on_the_screen_and_all_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owners, "log", logging.getLogger("apart"))
    caplog.set_level(logging.INFO)
    trainer: Any = SimpleNamespace(lightning_module=kept.Module(), callbacks=[])
    names = [f"name_{i}" for i in range(8)]
    owners.warn_of(trainer, "Lost: %s.", {("module", name): "why" for name in names})
    (_, level, shown), (_, full_level, full) = caplog.record_tuples
    assert (level, full_level) == (logging.WARNING, logging.INFO)  # the screen shows warnings
    assert "name_4 (why) and 3 more, which are in run.log" in shown
    assert all(f"Module.{name} (why)" in full for name in names)


@pytest.mark.parametrize("step", ["step_5", "step_10"])
def test_longer_run_goes_on_with_the_attributes_of_the_end(step: str, tmp_path: Path) -> None:
    """Also of the end of an epoch, where Lightning calls the hooks of the next one itself."""
    run_dir, reference = tmp_path / "run", tmp_path / "reference"
    run_dir.mkdir()
    cfg = config(run_dir, module="Numbers")
    train(cfg)
    expected = contents(run_dir)
    run_dir.rename(reference)
    run_dir.mkdir()
    num_epochs = cfg.trainer.max_epochs
    cfg.trainer.max_epochs = int(step.rpartition("_")[2]) // 5
    train(cfg)
    cfg.trainer.max_epochs, cfg.resume = num_epochs, str(run_dir / f"checkpoints/{step}.ckpt")
    train(cfg)
    found = contents(run_dir)
    names = ("metrics.csv", "last.ckpt")
    differing = [d for name in names for d in differences(expected[name], found[name], name)]
    assert [d for d in differing if "num_steps_planned" not in d and "/settings" not in d] == []


@pytest.mark.parametrize("kind", ["StepOutputs", "Objects"])
def test_keeping_is_needed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: nothing is put back."""
    monkeypatch.setattr(Attributes, "put_back", nothing)
    assert apart(tmp_path, module=kind)


def test_epoch_start_is_heard_where_a_run_goes_on_inside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the callback does not tell the data set of the epoch again."""
    monkeypatch.setattr(resume_states, "begin_epoch", nothing)
    assert apart(tmp_path, *BESIDE["data"])


def nothing(*_: Any, **__: Any) -> None:
    return None


def run_in_processes(folder: Path, strategy: str, *words: str) -> tuple[str, dict[str, Any]]:
    """The log of a command, and what is in the folder of its run."""
    data = ("data=synthetic", "data.batch_size=300", "data.noise=0.1", "test=false", "name=run")
    often = ("checkpoint.every_n_steps=1", "checkpoint.num_kept=1000")
    words = words if words[0].startswith("resume=") else (*data, *often, *words)
    status, said = execute(list(words), strategy, folder)
    assert status == 0, said
    (run_dir,) = (folder / "run").iterdir()
    return (run_dir / "run.log").read_text(), contents(run_dir)


def cut(folder: Path, step: int) -> str:
    """Leave a run as if it had been killed behind a step; the word that goes on with it."""
    (run_dir,) = (folder / "run").iterdir()
    for path in by_step(run_dir / "checkpoints"):
        if int(path.stem.rpartition("_")[2]) > step:
            path.unlink()
    link_newest(by_step(run_dir / "checkpoints")[-1])
    (run_dir / "results.json").unlink()
    return f"resume={run_dir}"


def chosen(module: str) -> tuple[str, ...]:
    return (f"model._target_={OWN}.{module}", "objective=val/loss", "mode=min")


@pytest.mark.parametrize("module", ["PerProcess", "Objects"])
def test_each_process_goes_on_with_its_own(module: str, tmp_path: Path) -> None:
    _, expected = run_in_processes(tmp_path, "ddp(2)", *chosen(module))
    said, found = run_in_processes(tmp_path, "ddp(2)", cut(tmp_path, 8))
    assert differences(expected, found) == []
    assert "as in a run that begins" not in said
    assert "Checkpoints lack" not in said


def test_one_process_goes_on_with_what_two_had_in_common(tmp_path: Path) -> None:
    _, expected = run_in_processes(tmp_path, "ddp(2)", *chosen("PerProcess"))
    said, found = run_in_processes(tmp_path, "cpu", cut(tmp_path, 8), "trainer.max_epochs=4")
    assert "PerProcess.losses" in said
    assert "PerProcess.rng" in said
    assert "PerProcess.offset" in said  # of a hook at the start
    assert said.count("differed between 2 processes") == 3
    assert "PerProcess.world" in said
    assert "(was 2, is 1)" in said
    copied = next(line for line in said.splitlines() if "had 2 processes and has 1 now" in line)
    assert "PerProcess.num_steps" in copied
    assert "PerProcess.losses" not in copied
    kept = [one["last.ckpt"]["safe_point"]["attributes"]["of_all"] for one in (expected, found)]
    assert [one["module", "num_steps"] for one in kept] == [15, 20]


def test_ddp_trains_what_one_process_has_unfrozen(tmp_path: Path) -> None:
    """It averages gradients of what was trainable as it wrapped the model."""
    _, expected = run_in_processes(tmp_path, "cpu", *chosen("Unfreezes"))
    _, found = run_in_processes(tmp_path, "ddp(2)", cut(tmp_path, 8))
    weights = [one["last.ckpt"]["state_dict"]["head.weight"] for one in (expected, found)]
    assert weights[0].allclose(weights[1], atol=0.1)  # dropout differs


def test_packed_values_are_plain_and_placed_as_they_were() -> None:
    """Also what holds itself, and what is held twice."""
    cycle: dict[str, Any] = {"losses": [1.0, float("nan")]}
    cycle["self"] = (cycle, cycle["losses"], {"#": "a key of its own"})
    file = io.BytesIO()
    torch.save(Packer({}, {}, 1e6).pack(cycle), file)
    file.seek(0)
    node = torch.load(file, weights_only=True)
    made = Placer({}, torch.device("cpu")).place(node)
    assert made["self"][0] is made
    assert made["self"][1] is made["losses"]
    assert made["self"][2] == {"#": "a key of its own"}
    assert made["losses"][0] == 1.0


def test_checkpoint_names_no_code_that_is_run(tmp_path: Path) -> None:
    """Objects are of classes that the owner's modules have; nothing else is looked up."""
    placer = Placer({}, torch.device("cpu"))
    node = {"#": "object", "class": "subprocess.Popen", "names": ["args"], "values": ["true"]}
    with pytest.raises(LostError, match="no subprocess"):
        placer.place(node)
    meter = node | {"class": f"{OWN}.AverageMeter"}
    assert vars(placer.place(meter)) == {"args": "true"}


def test_settings_of_the_new_command_stay(tmp_path: Path) -> None:
    """Only what training has changed is put back."""
    run_dir, reference = tmp_path / "run", tmp_path / "reference"
    run_dir.mkdir()
    cfg = config(run_dir, module="Numbers")
    train(cfg)
    run_dir.rename(reference)
    cfg.data.num_workers = 1
    train(resumed(cfg, reference, "step_9"))
    found = contents(run_dir)["last.ckpt"]["safe_point"]["attributes"]
    assert {owner for owner, _ in found["of_all"]} == {"module"}
