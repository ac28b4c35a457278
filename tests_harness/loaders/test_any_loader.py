"""Loaders that know nothing of this project mean the same under every strategy, or are refused."""

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from harness.data.stream_parts import fingerprint
from harness.data.streams import SharedStream
from tests_harness.conftest import ROOT
from tests_harness.strategy_runs import STRATEGIES

EQUAL = ("plain", "shuffled", "weighted", "bucketed", "by tokens", "endless", "several")
EQUAL += ("distributed", "of the module", "overridden", "longest", "own generator")
EQUAL += ("random split",)
DRAWN = ("random collate", "moved at random")  # for whole batches, as dropout does
PARTS = ("stream in parts", "stream with state", "streams of a DataModule")
ALONE = {  # what is refused where processes would have to share it
    "stream": "gives every process the same samples",
    "own iteration": "gives every process the same samples",
    "own order": "draws other batches in each process",
    "made batches": "has batch_size=None",
    "several uneven": "cannot share all of them evenly",
}


def cells(kinds: tuple[str, ...], strategies: tuple[str, ...], *more: str) -> dict[str, Any]:
    """What came of each kind under each strategy, found out by one process."""
    command = [sys.executable, "-m", "tests_harness.loaders.cells", "--json", *more, *kinds]
    command += [f"--strategy={name}" for name in strategies]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def check(kind: str, strategy: str, found: dict[str, Any]) -> None:
    """Compare one cell with what it must be."""
    if kind == "empty":
        assert found["status"] == 1
        assert "Data.train_dataloader gave no batch: nothing was trained." in found["said"]
        return
    has_parts = strategy not in ("cpu", "dp(2)")
    if has_parts and kind in ALONE:
        assert found["status"] == 1, found
        assert ALONE[kind] in found["said"]
        assert "Traceback" not in found["said"]
        return
    assert found["status"] == 0, found["said"]
    if kind == "own order":  # nobody can repeat it
        assert "draws other batches than before" in found["resumed"]["said"]
        return
    assert found["resumed"]["status"] == 0, found["resumed"]["said"]
    if has_parts and kind in DRAWN:
        pass
    elif has_parts and kind in PARTS:
        assert "others than one process would take" in found["said"]
    else:
        assert found["from_one_process"] < 1e-9
    assert found["resumed"]["distance"] < 1e-9
    if strategy != "ddp(3)":  # a new start may change the order in which three are added up
        assert found["resumed"]["differences"] == []


@pytest.mark.parametrize(
    "kinds",  # all of them under every strategy: with -m slow
    [
        ("weighted", "by tokens", "several", "of the module"),
        ("distributed", "overridden", "random collate", "empty"),
        PARTS,
        (*ALONE,),
    ],
    ids="_".join,
)
def test_two_processes_train_as_one_does(kinds: tuple[str, ...]) -> None:
    found = cells(kinds, ("cpu", "ddp(2)"))
    for kind in kinds:
        for strategy, cell in found[kind].items():
            check(kind, strategy, cell)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [*EQUAL, *DRAWN, *PARTS, *ALONE])
def test_every_strategy_trains_as_one_process_does(kind: str, num_workers: int) -> None:
    found = cells((kind,), tuple(STRATEGIES), f"--workers={num_workers}")
    for strategy, cell in found[kind].items():
        check(kind, strategy, cell)


def test_a_batch_without_an_element_is_not_the_end_of_a_stream() -> None:
    batches = [{"inputs": torch.zeros(0, 3)}, {"inputs": torch.ones(2, 3)}]
    assert len(list(SharedStream(batches, "batches", num_ranks=1, seed=0))) == 2


def test_a_batch_that_is_changed_in_place_is_still_known() -> None:
    """An augmentation may do so while the batch is moved, before a checkpoint is written."""
    batches = [{"inputs": torch.ones(2)}, {"inputs": torch.zeros(2)}]
    stream = SharedStream(copy.deepcopy(batches), "batches", num_ranks=1, seed=0)
    for batch in stream:
        batch["inputs"] = batch["inputs"] + 1
    for number, batch in enumerate(batches):
        assert stream.state(0, number)["comes"] == fingerprint(batch)
