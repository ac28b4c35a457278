"""Changing the strategy or the devices changes the speed of an experiment and nothing else."""

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ci, slow
from tests.strategy_runs import NO_FSDP, distances, in_processes, outcome, run_of
from tests.workers.user_runs import evaluate_sizes

# An odd batch size, so that shares differ in size; the last batches have one sample, and the shares
# of most processes none.
EXPERIMENT = (
    *("data=synthetic", "model=mlp", "data.batch_size=37", "data.noise=0.1"),
    *("data.num_train=1222", "data.num_val=186"),
)
IN_PARTS = "data.max_samples_per_device=5"


def train(folder: Path, strategy: str, *overrides: str) -> dict[str, Any]:
    """Run the experiment; return its weights, results and what evaluations have logged."""
    return outcome(run_of([*EXPERIMENT, *overrides], strategy, folder, "default"))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("one"), "cpu")


@pytest.mark.parametrize(
    ("strategy", "overrides"),
    [
        ("dp(2)", ()),
        ("ddp(3)", (IN_PARTS, "data.num_workers=1")),
        *ci(("ddp2(2x2)", ())),
        *slow(("cpu", ("trainer.accumulate_grad_batches=4",)), ("ddp(2)", (IN_PARTS,))),
        *slow(("ddp(2)", ())),
        *slow(*[("fsdp(2)", (IN_PARTS,))] * (not NO_FSDP)),
    ],
)
def test_weights_and_scores_are_those_of_one_process(
    strategy: str, overrides: tuple[str, ...], one_process: dict[str, Any], tmp_path: Path
) -> None:
    apart = distances(one_process, train(tmp_path, strategy, *overrides))
    assert "results.json: test/loss" in apart
    # Metrics are computed in single precision.
    bounds = {name: 1e-6 if ": " in name else 1e-12 for name in apart}
    assert {name: far for name, far in apart.items() if far > bounds[name]} == {}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory):
    """Run the worker once per number of processes."""

    @cache
    def evaluate(devices: int) -> Path:
        folder = tmp_path_factory.mktemp(f"devices{devices}")
        in_processes(devices, evaluate_sizes, devices, folder)
        return folder

    return evaluate


@pytest.mark.parametrize("devices", [2, 3])
def test_scores_do_not_depend_on_the_processes(devices: int, evaluated) -> None:
    """Also for fewer batches than processes, and for plain values logged in the step."""
    expected = json.loads((evaluated(1) / "results.json").read_text())
    found = json.loads((evaluated(devices) / "results.json").read_text())
    assert set(found) == {"3", "4", "33", "359", "360"}
    for num_samples, scores in expected.items():
        assert found[num_samples] == pytest.approx(scores, abs=1e-6), num_samples


@pytest.mark.parametrize("devices", [2, 3])
def test_predictions_are_complete_and_in_order(devices: int, evaluated) -> None:
    for num_samples in (3, 4, 33, 359, 360):
        tables = []
        for folder in (evaluated(1), evaluated(devices)):
            with (folder / f"{num_samples}.csv").open() as file:
                tables.append(list(csv.DictReader(file)))
        assert [row["sample"] for row in tables[1]] == [str(i) for i in range(num_samples)]
        assert tables[0] == tables[1]
