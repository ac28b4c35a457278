"""``resume=`` as a user types it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from harness import provenance
from harness.command import choose_run, run_folder
from harness.command import main as cli
from harness.command.compose import compose, compose_command
from harness.errors import UserError
from tests.faults.fork_server import command
from tests.refusals import refusal


def contents(folder: Path) -> dict[Path, bytes]:
    """All files but the lock, which names the last command that held it."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != run_folder.LOCK)
    return {path: path.read_bytes() for path in paths}


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    """A finished run that a test may change."""
    folder = tmp_path / "outputs" / "default" / finished_run.name
    shutil.copytree(finished_run, folder, symlinks=True)
    return folder


def test_finished_run_says_so(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data=synthetic", "model=mlp", "trainer.max_epochs=2", "resume=auto")
    cli.main("train", "conf", [*words, f"output_dir={run_copy.parents[1]}"])
    assert "has finished: test/loss" in capsys.readouterr().out
    assert len(list(run_copy.parent.iterdir())) == 1


def test_copy_of_a_finished_run_takes_more_epochs(run_copy: Path, finished_run: Path) -> None:
    """The original, which the copy's checkpoints and config were made in, stays as it is."""
    before = contents(finished_run)
    result = command("train.py", f"resume={run_copy}", "trainer.max_epochs=3")
    assert result.returncode == 0, result.stderr
    assert "dirpath has changed" not in result.stderr
    assert contents(finished_run) == before
    last = torch.load(run_copy / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["epoch"] == 3
    (state,) = [state for key, state in last["callbacks"].items() if "ModelCheckpoint" in key]
    assert state["best_model_path"] == str(run_copy / "checkpoints" / "best.ckpt")
    assert len(state["best_k_models"]) == 1
    assert "max_epochs: 3" in (run_copy / "config.yaml").read_text()


def test_another_result_is_refused_with_the_difference(run_copy: Path) -> None:
    before = contents(run_copy)
    for words, hint in {
        "seed=2": "seed=2 (the run has 1)",
        "data.batch_size=32": "data.batch_size=32 (the run has 64)",
        "trainer.max_epochs=1": "trainer.max_epochs=1 (the run has 2)",
        "trainer.max_epochs=null": "trainer.max_epochs=null (the run has 2)",
        "trainer.max_steps=20": "trainer.max_steps=20 (the run has -1)",
        "mode=min objective=val/loss": "mode=min (the run has max)",  # best.ckpt is that of max
        "model=cnn": "model.net._target_=small.models.CNN",
        "experiment=synthetic": "model.optimizer.lr=0.003 (the run has 0.005)",
    }.items():
        said = refusal(f"resume={run_copy}", *words.split())
        assert hint in said
        assert "Leave out these overrides" in said
        assert len(said.splitlines()) == 2
    assert contents(run_copy) == before


def test_where_a_run_is_computed_may_change(run_copy: Path) -> None:
    words = ["strategy=ddp", "trainer.devices=2", "data.num_workers=1", "gpus=emptiest"]
    words += ["gpus.min_free_gib=20", "resume=auto", "parity_check=false"]
    config = choose_run.resumed_config(compose_command("train", words), run_copy)
    assert config.gpus == {"order": "emptiest", "min_free_gib": 20}
    assert config.trainer.devices == 2
    assert config.trainer.strategy._target_.endswith("DDPStrategy")
    assert config.data.num_workers == 1
    assert config.model.net._target_.endswith("MLP")
    assert str(choose_run.newest_checkpoint(run_copy)).endswith("step_40.ckpt")


def test_damaged_checkpoints_and_results_are_told_with_what_to_do(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results are computed again, and a run that has lost its weights is no new one."""
    results = run_copy / "results.json"
    saved = json.loads(results.read_text())
    results.write_text("{")
    assert "Remove the file, and test again: python train.py resume=" in refusal(
        f"resume={run_copy}"
    )
    results.unlink()
    assert command("train.py", f"resume={run_copy}").returncode == 0
    again = json.loads(results.read_text())
    assert [again[name] for name in saved if "test/" in name]
    assert all(again[name] == saved[name] for name in saved if "test/" in name)
    for path in (run_copy / "checkpoints").glob("step_*"):
        path.write_bytes(path.read_bytes()[:-5])
    results.unlink()
    assert "has no complete checkpoint" in refusal(f"resume={run_copy}")
    assert "is damaged and was skipped" in capsys.readouterr().err
    assert "Use resume=auto, or name a run: resume=" in refusal("resume=nowhere")


def test_another_strategy_keeps_nothing_of_the_one_before(saved_run: Callable[..., Path]) -> None:
    """Its class would refuse the other's settings, or follow them."""
    for before, after in (("ddp", "dp"), ("dp", "ddp")):
        found = go_on(saved_run(f"strategy={before}"), f"strategy={after}").trainer
        assert found == compose("train", [f"strategy={after}"]).trainer


@pytest.fixture
def saved_run(tmp_path: Path) -> Callable[..., Path]:
    """Save the config of a run that was started with these overrides."""

    def save(*words: str) -> Path:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        run_folder.save_config(run_folder.freeze(compose("train", list(words)), folder), folder)
        run_folder.save_overrides(words, folder)
        return folder

    return save


def go_on(folder: Path, *words: str) -> DictConfig:
    config = choose_run.resumed_config(compose_command("train", words), folder)
    config.resume = choose_run.newest_checkpoint(folder, config.get("resume"))
    return config


def test_run_without_a_checkpoint_yet_begins_anew_and_says_so(
    saved_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_run()
    (folder / "metrics.csv").write_text("step,loss\n0,1.0\n")
    assert go_on(folder).resume is None
    assert "before its first checkpoint: it starts again at step 0" in capsys.readouterr().err


@pytest.mark.parametrize("trace", ["checkpoints/step_3.ckpt.damaged", "results.json", "resume"])
def test_run_that_has_lost_its_checkpoints_is_refused(
    trace: str, saved_run: Callable[..., Path]
) -> None:
    folder = saved_run()
    (folder / "checkpoints").mkdir()
    (folder / trace).touch()
    if trace == "resume":
        config = run_folder.load_config(folder)
        config.resume = "step_3.ckpt"
        run_folder.save_config(config, folder)
    with pytest.raises(UserError, match="has saved checkpoints, but "):
        go_on(folder)


def test_refused_command_leaves_the_run_as_it_was(
    saved_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved_run()
    (folder / "results.json").write_text("{}")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(choose_run, "newest_checkpoint", lambda *_: None)

    def refuse(task: str, cfg: DictConfig) -> None:
        assert cfg.trainer.max_epochs == 50
        raise UserError("The data are others.")

    monkeypatch.setattr(cli, "run_task", refuse)
    words = ["trainer.max_epochs=50", f"resume={folder}"]
    with pytest.raises(UserError, match="others"):
        cli.start_command(compose_command("train", words))
    (folder / run_folder.LOCK).unlink()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before

    monkeypatch.setattr(cli, "run_task", lambda *_: provenance.begin(folder))  # as training begins
    cli.start_command(compose_command("train", words))
    assert run_folder.load_config(folder).trainer.max_epochs == 50
    assert not (folder / "results.json").exists()


def test_run_is_composed_with_the_words_that_first_started_it(
    saved_run: Callable[..., Path],
) -> None:
    """Only the run and what may change are typed; what may not is refused with the difference."""
    words = ("experiment=synthetic", "model.net.dropout=0.1", "strategy=ddp", "trainer.devices=2")
    folder = saved_run(*words, "+callbacks.mine._target_=tests.monitoring.labels.Labels", "seed=3")
    this = f"resume={folder}"
    again = go_on(folder, this, "trainer.max_epochs=50", "data.num_workers=1")
    assert (again.model.net.dropout, again.seed, again.trainer.max_epochs) == (0.1, 3, 50)
    assert again.trainer.devices == 2
    with pytest.raises(UserError, match=r"dropout=0\.2 \(the run has 0\.1\)"):
        go_on(folder, this, "model.net.dropout=0.2")
    with pytest.raises(UserError, match=r"Did you mean model\.net\.dropout"):
        go_on(folder, this, "model.net.droput=0.2")
    assert "DataParallel" in go_on(folder, this, "strategy=dp").trainer.strategy._target_
    assert go_on(folder, this, *words[1:]).model.net.dropout == 0.1
    # The 20 epochs of the config do not shorten a run that continues to 30.
    again = go_on(saved_run(words[0], "trainer.max_epochs=30", "seed=3"), words[0])
    assert (again.trainer.max_epochs, again.seed) == (30, 3)
