"""Checkpoints have plain values; other objects are left out with a warning, unless trusted."""

import enum
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from harness import UserError, convert, evaluate, load_run, predict, train
from harness.checkpoints.reading import read, read_to_resume, read_weights, unreadable
from harness.checkpoints.writing import DurableCheckpointIO
from tests.faults.plain_module import PlainModule
from tests.faults.resume_sweep import COMMON
from tests.faults.run_folder import contents, differences, leave_at

# Lightning recommends to leave a network out, which users often do not.
pytestmark = pytest.mark.filterwarnings("ignore:Attribute '.*' is an instance of")

SHORT = (*COMMON, "trainer.max_epochs=1", "callbacks.learning_rate=null", "name=own")


class Colour(enum.Enum):
    RED = 1


class Executed:
    """Notes when a file that holds it is read by executing what it names."""

    times: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return Executed.read, ()

    @staticmethod
    def read() -> "Executed":
        Executed.times.append(1)
        return Executed()


class Template(PlainModule):
    """The best-known template's way: what builds the module is a hyper-parameter."""

    def __init__(self, net: nn.Module, optimizer: Any, **_: Any) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        kept = {"partial": partial(torch.optim.SGD, lr=0.1), "Enum": Colour.RED, "class": nn.ReLU}
        kept |= {"DictConfig": OmegaConf.create({"a": [1, 2]}), "objects": np.array([None, "a"])}
        self.save_hyperparameters({"kept": kept}, logger=False)


def test_hyper_parameters_that_are_not_plain_are_left_out_said_once_and_built_again(
    tmp_path: Path,
) -> None:
    template = (f"model._target_={__name__}.Template", "objective=val/loss", "mode=min")
    run = train(*SHORT, *template, f"output_dir={tmp_path}")
    told = (run.folder / "run.log").read_text()
    assert told.count("Checkpoints leave out the hyper-parameters net, ") == 1
    assert "If your code reads them, as in self.hparams.optimizer, leave them" in told  # see below
    assert torch.load(run.checkpoint)["hyper_parameters"].keys() & {"net", "kept"} == set()
    reference = contents(run.folder)
    leave_at(run.folder, 2)
    train(f"resume={run.folder}")
    assert differences(reference, contents(run.folder)) == []


class Odd(pl.Callback):
    """Keeps what no resume can read."""

    made = Colour.RED

    def state_dict(self) -> dict[str, Any]:
        return {"history": [1.0, self.made]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made = state_dict["history"][1]


class OddKeyRead(PlainModule):
    """Adds objects to checkpoints, and reads one."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"colour": Colour.RED, "executed": Executed()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.colour = checkpoint["colour"].value


ODD = (f"+callbacks.odd._target_={__name__}.Odd", f"model._target_={__name__}.OddKeyRead")


@pytest.mark.ci
def test_objects_are_told_once_and_nothing_goes_on_without_them(tmp_path: Path) -> None:
    run = train(*SHORT, *ODD, f"output_dir={tmp_path}")
    told = (run.folder / "run.log").read_text()
    lost = f"callbacks.Odd.history.1 ({__name__}.Colour), colour ({__name__}.Colour), "
    lost += f"executed ({__name__}.Executed)"
    assert told.count(f"Checkpoints leave out {lost}. No run can resume") == 1
    assert told.count("Or save other objects with checkpoint.trusted=true") == 1
    for path in (run.folder / "checkpoints").iterdir():
        torch.load(path, weights_only=True)
    assert "test/loss" in evaluate(run.checkpoint).results
    leave_at(run.folder, 2)
    for more in ((), ("checkpoint.trusted=true",)):
        with pytest.raises(UserError, match="cannot be resumed: it lacks") as refusal:
            train(f"resume={run.folder}", *more)
        assert "trusted" not in str(refusal.value)  # it would not help


def test_trusted_checkpoints_keep_objects_and_go_on(tmp_path: Path) -> None:
    Executed.times.clear()
    run = train(*SHORT, *ODD, f"output_dir={tmp_path}", "checkpoint.trusted=true")
    assert "leave out" not in (run.folder / "run.log").read_text()
    # A command that needs only the weights executes nothing.
    assert "test/loss" in evaluate(run.checkpoint).results
    predict(run.checkpoint, f"output={tmp_path / 'out.csv'}")
    assert convert.convert(run.checkpoint, tmp_path / "weights.pt").tensors
    load_run(run.folder)
    last = run.folder / "checkpoints" / "last.ckpt"
    weights = read_weights(last)
    leave_at(run.folder, 2)
    with pytest.raises(
        UserError, match=r"holds objects.*\nIf you trust the file, use checkpoint.trusted=true"
    ):
        train(f"resume={run.folder}", "checkpoint.trusted=false")
    with pytest.raises(UserError, match=r"checkpoint\.trusted is true in the config of .*, and"):
        train(f"resume={run.folder}")  # it may be a stranger's, and not this one
    assert Executed.times == []
    train(f"resume={run.folder}", "checkpoint.trusted=true")
    assert Executed.times
    again = read(last, is_trusted=True)
    assert again["colour"] is again["callbacks"]["Odd"]["history"][1] is Colour.RED
    assert differences(weights, dict(again["state_dict"])) == []


def test_nothing_in_a_file_is_executed_unless_it_is_trusted(tmp_path: Path) -> None:
    Executed.times.clear()
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "hyper_parameters": {"a": Executed()}}, path)
    assert unreadable(path) is None  # whole, though it holds an object
    with pytest.raises(UnpicklingError):
        read(path)
    with pytest.raises(UserError, match="it holds objects"):
        read_to_resume(path, "cpu", is_trusted=False)
    assert read_weights(path)["w"].tolist() == [1, 1]
    assert Executed.times == []
    read(path, is_trusted=True)
    assert Executed.times


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
    assert "leave out the hyper-parameters window, groups. A" in caplog.text


def noted(tensor: Tensor) -> Tensor:
    tensor.note = 0.5  # type: ignore[attr-defined]
    return tensor


def test_packed_values_are_plain_and_come_back_as_they_were(tmp_path: Path) -> None:
    shared, array = [1.0, np.float32(2)], np.ones(2)
    values = {
        "one": [shared, array],
        "other": (shared, array),
        "mark": {"#": 1, (1, "a"): 2},
        "scalar": np.float64(0.1),
        "whole number": np.int64(3),
        "array": np.arange(6, dtype=">f4").reshape(2, 3),
        "Fortran array": np.asfortranarray(np.ones((2, 3))),
        "texts": np.array(["a", "bc"]),
        "times": np.array(["2026-01-01"], "M8[s]"),
        "deque": deque([1.0, np.float32(2)], maxlen=3),
        "defaultdict": defaultdict(list, a=[1]),
        "Counter": Counter("aab"),
        "OrderedDict": OrderedDict(b=1, a=(2, None)),
        "set": {1, "a"},
        "frozenset": frozenset([1]),
        "complex": 1 + 2j,
        "bytes": b"a\xff",
        "bytearray": bytearray(b"a\xff"),
        "generator": np.random.RandomState(0).get_state(),
        "tensor with a note": noted(torch.ones(2)),
        "parameter with a note": noted(nn.Parameter(torch.ones(2))),
        "sparse": torch.eye(2).to_sparse(),
        "dtype of torch": {torch.float16: torch.device("cpu")},
    }
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
