"""Settings that are found by trying them: a line to paste, and nothing left behind."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from small.models import Classifier

from harness.command.compose import compose
from harness.strategies.launchable import num_processes, runs_program_again
from harness.tune import __main__ as tune


def last_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str
) -> tuple[str, str]:
    """Tune; nothing but a picture may be left."""
    status = tune.main(
        [*arguments, "model=mlp", "trainer.accelerator=cpu", f"output_dir={tmp_path}"]
    )
    screen = capsys.readouterr()
    assert status == 0, screen.err
    assert {path.name for path in tmp_path.iterdir()} <= {"tune"}
    return screen.out.strip().splitlines()[-1], screen.out


def test_batch_size_is_what_fits_in_each_process(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that holds 30 samples."""
    loss = Classifier.loss

    def limited(self: Classifier, logits: Any, labels: Any) -> Any:
        if len(labels) > 30:
            raise RuntimeError("CUDA out of memory. Tried to allocate all there is.")
        return loss(self, logits, labels)

    monkeypatch.setattr(Classifier, "loss", limited)
    for words, expected in (
        (("data.drop_last=true", "data.max_samples_per_device=8"), 16),
        (("strategy=ddp", "trainer.devices=3"), 48),
        (("strategy=ddp2", "trainer.devices=2"), 16),
    ):
        line, screen = last_line(capsys, tmp_path, "batch-size", *words)
        assert line == f"data.batch_size={expected}", words
        assert screen.startswith("16 samples fit")
        assert "; 32 do not." in screen


def test_data_set_bounds_the_batch_size(capsys, tmp_path: Path) -> None:
    """A power of two that was tried in each process, and never more than the 1,250 samples."""
    words = ("strategy=ddp", "trainer.devices=2")
    line, screen = last_line(capsys, tmp_path, "batch-size", *words)
    assert line == "data.batch_size=1250"
    assert "1024 samples fit" in screen
    assert "memory is no limit" in screen


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_learning_rate_is_a_line_to_paste_and_a_picture(capsys, tmp_path: Path) -> None:
    line, _ = last_line(capsys, tmp_path, "lr")
    key, _, value = line.partition("=")
    assert key == "model.optimizer.lr"
    assert 1e-6 < float(value) < 1
    assert compose("train", [line]).model.optimizer.lr == float(value)
    assert (tmp_path / "tune" / "lr.png").stat().st_size > 5000


def test_workers_are_a_line_to_paste(capsys, tmp_path: Path) -> None:
    line, screen = last_line(capsys, tmp_path, "workers")
    assert line.startswith("data.num_workers=")
    assert "batches per second with 0: " in screen


def test_mistakes_are_explained(capsys, tmp_path: Path) -> None:
    for arguments, hint in (
        (["workers", "lr=3"], "Did you mean model.optimizer.lr?"),
        (["workers", "data=null"], "tune.py workers needs a harness.DataModule"),
        (["batch-size", "data.batch_size=0"], "must be a whole number"),
        (["lr", "model.net._target_=nope.Net"], "does not exist"),
    ):
        assert tune.main([*arguments, f"output_dir={tmp_path}"]) == 1, arguments
        assert hint in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


def test_processes_are_counted_as_the_strategy_starts_them() -> None:
    """And who starts the program again is known: from Python a script would train twice."""
    for words, expected, runs_again in (
        ("strategy=cpu", 1, False),
        ("strategy=dp trainer.devices=2", 1, False),
        ("strategy=ddp trainer.devices=3", 3, True),
        ("strategy=ddp trainer.devices=1", 1, True),
        ("strategy=ddp trainer.devices=[0,2] trainer.num_nodes=2", 4, True),
        ("strategy=ddp2 trainer.devices=2 trainer.num_nodes=3", 3, False),
        ("strategy=ddp_spawn trainer.devices=2", 2, False),
        ("trainer.strategy=ddp_find_unused_parameters_true trainer.devices=2", 2, True),
        ("trainer.strategy=fsdp trainer.devices=2", 2, True),
        ("trainer.devices=2", 2, True),  # Lightning takes ddp
        ("trainer.devices=auto", 1, False),
    ):
        cfg = compose("train", [*words.split(), "trainer.accelerator=cpu"])
        trainer = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)).trainer
        assert (num_processes(trainer), runs_program_again(trainer)) == (expected, runs_again), (
            words
        )
