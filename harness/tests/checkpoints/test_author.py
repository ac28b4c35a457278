"""Every checkpoint is plain; what is not is left out and told, or kept where the run says so."""

from collections import Counter, defaultdict, deque
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
import torch

from harness import UserError, convert, evaluate, load_run, predict, train
from harness.checkpoints.reading import read, read_to_resume, read_weights, unreadable
from harness.checkpoints.writing import DurableCheckpointIO
from tests.checkpoints import author
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
    assert told.count("Checkpoints leave out the hyper-parameters net, ") == 1
    assert "self.save_hyperparameters(ignore=[...]) says so in the code" in told
    assert torch.load(run.checkpoint)["hyper_parameters"].keys() & {"net", "kept"} == set()
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


NOT_PLAIN: dict[tuple[str, ...], str] = {
    (f"+callbacks.odd._target_={AUTHOR}.Odd",): f"callbacks.Odd.history.1 ({AUTHOR}.Colour), "
    f"callbacks.Odd.executed ({AUTHOR}.Executed)",
    (f"model._target_={AUTHOR}.OddKeyRead",): f"colour ({AUTHOR}.Colour), executed "
    f"({AUTHOR}.Executed)",
}


@pytest.mark.parametrize("settings", NOT_PLAIN)
def test_objects_are_told_once_and_nothing_goes_on_without_them(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    run = train(*words(tmp_path, *settings))
    told = (run.folder / "run.log").read_text()
    assert told.count(f"Checkpoints leave out {NOT_PLAIN[settings]}: no run can go on") == 1
    assert told.count("checkpoint.trusted=true keeps") == 1
    for path in (run.folder / "checkpoints").iterdir():
        torch.load(path, weights_only=True)
    assert "test/loss" in evaluate(run.checkpoint).results
    leave_at(run.folder, 2)
    for more in ((), ("checkpoint.trusted=true",)):
        with pytest.raises(UserError, match="cannot be gone on with: it lacks") as refusal:
            train(f"resume={run.folder}", *more)
        assert "trusted" not in str(refusal.value)  # it would not help


@pytest.mark.parametrize("settings", NOT_PLAIN)
def test_trusted_checkpoints_keep_objects_and_go_on(
    settings: tuple[str, ...], tmp_path: Path
) -> None:
    author.Executed.times.clear()
    run = train(*words(tmp_path, *settings, "checkpoint.trusted=true"))
    assert "leave out" not in (run.folder / "run.log").read_text()
    # What only needs the weights executes nothing.
    assert "test/loss" in evaluate(run.checkpoint).results
    predict(run.checkpoint, f"output={tmp_path / 'out.csv'}")
    assert convert.convert(run.checkpoint, tmp_path / "weights.pt").tensors
    load_run(run.folder)
    last = run.folder / "checkpoints" / "last.ckpt"
    weights = read_weights(last)
    leave_at(run.folder, 2)
    with pytest.raises(UserError, match=r"holds objects.*\ncheckpoint.trusted=true goes on"):
        train(f"resume={run.folder}", "checkpoint.trusted=false")
    assert author.Executed.times == []
    train(f"resume={run.folder}")
    again = read(last, is_trusted=True)
    assert author.Executed.times
    history = again["callbacks"].get("Odd", {}).get("history", [])
    assert author.Colour.RED in (again.get("colour"), *history)
    assert differences(weights, dict(again["state_dict"])) == []


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_nothing_in_a_file_is_executed_unless_it_is_trusted(tmp_path: Path) -> None:
    mark, path = tmp_path / "executed", tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"a": Evil(mark)}}, path)
    assert unreadable(path) is None  # whole, though it holds an object
    with pytest.raises(UnpicklingError):
        read(path)
    with pytest.raises(UserError, match="it holds objects"):
        read_to_resume(path, "cpu", is_trusted=False)
    assert read_weights(path)["w"].tolist() == [1, 1]
    assert not mark.exists()
    read(path, is_trusted=True)
    assert mark.exists()


def test_hyper_parameters_that_torch_reads_as_they_are_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"kinds": Counter("aab"), "sizes": {1: "a", (2, None): {0.5: [1]}}, "rate": 0.1}
    others = {"window": deque([1]), "groups": defaultdict(list, a=[1])}
    path = tmp_path / "a.ckpt"
    DurableCheckpointIO().save_checkpoint({"hyper_parameters": kept | others}, path)
    for found in (torch.load(path, weights_only=True), read(path)):
        assert found["hyper_parameters"] == kept
        assert type(found["hyper_parameters"]["kinds"]) is Counter
    assert "leave out the hyper-parameters window, groups, which" in caplog.text


def test_packed_values_are_plain_and_come_back_as_they_were(tmp_path: Path) -> None:
    shared, array = [1.0, np.float32(2)], np.ones(2)
    values = {name: make() for name, make in author.KNOWN.items()}
    values |= {"one": [shared, array], "other": (shared, array), "mark": {"#": 1, (1, "a"): 2}}
    path = tmp_path / "a.ckpt"
    DurableCheckpointIO().save_checkpoint({"values": values}, path)
    torch.load(path, weights_only=True)
    found = read(path)["values"]
    assert differences(values, found) == []
    assert [type(value) for value in found.values()] == [type(value) for value in values.values()]
    assert found["one"][0] is found["other"][0]
    assert found["one"][1] is found["other"][1]
    assert found["deque"].maxlen == 3
    assert found["defaultdict"]["new"] == []
    assert found["Fortran array"].flags.f_contiguous
