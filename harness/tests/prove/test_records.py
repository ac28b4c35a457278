"""Where two runs depart, and what is rounding."""

import pytest
import torch

from harness.prove.recording import keep
from harness.prove.records import DOUBLE, SINGLE, Records, departures
from harness.prove.short_epochs import FirstBatches, uneven


def records(*weights: float, metric: float = 1.0, start: float = 0.0) -> Records:
    """A run of one weight, and one metric of an evaluation after its last step."""
    rank = {
        "start_0": {"state": {"w": keep("parameter", torch.tensor([start], dtype=torch.float64))}}
    }
    for step, weight in enumerate(weights, start=1):
        rank[f"step_{step}"] = {
            "state": {"w": keep("parameter", torch.tensor([weight], dtype=torch.float64))}
        }
    rank[f"val_{len(weights)}"] = {"metrics": {"val/loss": metric}, "batches": []}  # type: ignore[dict-item]
    return Records([rank], {"logged": {"val/loss": {"stages": ["evaluation"]}}})


def test_the_first_departure_is_found_with_its_step_and_distance() -> None:
    (found,) = departures(records(0.1, 0.2, 0.3), records(0.1, 0.25, 0.9), DOUBLE)
    assert (found.kind, found.name, found.step) == ("parameter", "w", 2)
    assert found.distance == pytest.approx(0.05)


def test_rounding_is_no_departure() -> None:
    for far, tolerance in ((1e-12, DOUBLE), (1e-7, SINGLE)):
        assert not departures(records(0.1), records(0.1 + far), tolerance)
    for far, tolerance in ((1e-7, DOUBLE), (1e-2, SINGLE)):
        assert departures(records(0.1), records(0.1 + far), tolerance)


def test_by_bit_nothing_is_rounding() -> None:
    assert departures(records(0.1), records(0.1 + 2e-17), DOUBLE, by_bit=True)  # one bit
    assert not departures(records(0.1), records(0.1), DOUBLE, by_bit=True)


def test_a_metric_departs_though_the_weights_do_not() -> None:
    for value in (1.001, float("nan")):
        (found,) = departures(records(0.1, metric=1.0), records(0.1, metric=value), DOUBLE)
        assert (found.kind, found.name, found.step) == ("metric", "val/loss", 1)


def test_the_last_batch_is_shared_unevenly_by_two_and_by_three() -> None:
    for size in (8, 10, 32, 64, 100, 256):
        assert uneven(size) < size
        assert uneven(size) % 2
        assert uneven(size) % 3


def test_an_epoch_is_three_batches_of_which_the_last_is_cut() -> None:
    batches = torch.utils.data.BatchSampler(range(100), 8, drop_last=False)
    assert [len(batch) for batch in FirstBatches(batches)] == [8, 8, 7]
    whole = torch.utils.data.BatchSampler(range(100), 8, drop_last=True)
    assert [len(batch) for batch in FirstBatches(whole)] == [8, 8, 8]
