"""Checkpoints keep what their author saved; what no run could go on from is refused at once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import UserError, convert, evaluate, load_run, predict, train
from harness.checkpoints.reading import read
from harness.checkpoints.stand_in import StandIn
from tests.checkpoints import author
from tests.faults.fork_server import command
from tests.faults.resume_sweep import COMMON
from tests.faults.run_folder import contents, differences, leave_at

# Lightning recommends to leave a network out, which authors do not.
pytestmark = pytest.mark.filterwarnings("ignore:Attribute '.*' is an instance of")

AUTHOR = "tests.checkpoints.author"
SHORT = (*COMMON, "trainer.max_epochs=1", "callbacks.learning_rate=null", "name=own")


def words(folder: Path, *more: str) -> list[str]:
    return [*SHORT, f"output_dir={folder}", *more]


TEMPLATE = (f"model._target_={AUTHOR}.Template", "objective=val/loss", "mode=min")


def test_run_with_any_hyper_parameter_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tested at its end, resumed from its middle, evaluated, predicted, converted."""
    run = train(*words(tmp_path, *TEMPLATE))
    assert "test/loss" in run.results
    told = (run.folder / "run.log").read_text()
    assert told.count("The checkpoints keep hyper_parameters.net (small.models.MLP)") == 1
    assert "hyper_parameters.kept" in told
    assert "self.save_hyperparameters(ignore=['net', 'optimizer', " in told
    reference = contents(run.folder)
    leave_at(run.folder, 2)
    run = train(f"resume={run.folder}")
    assert differences(reference, contents(run.folder)) == []
    again = evaluate(run.checkpoint, "trainer.enable_progress_bar=false").results
    assert again["test/loss"] == pytest.approx(run.results["test/loss"])
    out = predict(run.checkpoint, f"output={tmp_path / 'out.csv'}")
    assert out.read_text().count("\n") > 100
    report = convert.convert(run.checkpoint, tmp_path / "weights.pt")
    assert report.tensors
    load_run(run.folder).model.load_state_dict(read(run.checkpoint)["state_dict"])
    assert "damaged" not in capsys.readouterr().err + told
    # As with Lightning alone.
    model = author.Template.load_from_checkpoint(run.checkpoint, weights_only=False)
    assert differences(read(run.checkpoint)["state_dict"], model.state_dict()) == []
    assert model.hparams["kept"]["partial"].keywords == {"lr": 0.1}
    kept = read(run.checkpoint)["hyper_parameters"]["kept"]
    assert {type(value) for name, value in kept.items()} == {StandIn}


REFUSED: dict[tuple[str, ...], list[str]] = {
    (f"+callbacks.odd._target_={AUTHOR}.Odd",): [
        f"callbacks.Odd.history[1] ({AUTHOR}.Colour)", "Odd.state_dict", "author.py:",
        "checkpoint=null",
    ],
    (f"model._target_={AUTHOR}.OddKeyRead",): [
        f"colour ({AUTHOR}.Colour)", "OddKeyRead.on_save_checkpoint",
    ],
}  # fmt: skip


def test_what_no_run_could_go_on_from_is_refused_at_the_first_checkpoint(tmp_path: Path) -> None:
    for number, (settings, said) in enumerate(REFUSED.items()):
        folder = tmp_path / str(number)
        with pytest.raises(UserError) as refused:
            train(*words(folder, *settings, "callbacks.learning_rate=null"))
        assert [text for text in said if text not in str(refused.value)] == []
        assert str(refused.value).count("\n") <= 2
        (checkpoints,) = folder.glob("own/*/checkpoints")
        assert list(checkpoints.iterdir()) == []


def test_what_nobody_reads_is_kept_and_told_once(tmp_path: Path) -> None:
    callback, module = f"+callbacks.odd._target_={AUTHOR}.OddUnread", f"{AUTHOR}.OddKey"
    run = train(*words(tmp_path, callback, f"model._target_={module}"))
    assert (run.folder / "run.log").read_text().count("which is not plain") == 1
    saved: Any = torch.load(run.checkpoint, weights_only=False)
    assert saved["colour"] is saved["callbacks"]["OddUnread"]["colour"] is author.Colour.RED


def test_refusal_leaves_no_process_waiting(tmp_path: Path) -> None:
    """The first process writes; the others wait for it."""
    odd = f"+callbacks.odd._target_={AUTHOR}.Odd"
    on_two = ("strategy=ddp", "trainer.devices=2")
    result = command("train.py", *words(tmp_path, odd, *on_two))
    assert result.returncode == 1
    assert "callbacks.Odd.history[1]" in result.stderr
    assert "Traceback" not in result.stderr
