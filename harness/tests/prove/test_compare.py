"""Where two runs differ, and what is rounding."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.prove.compare import BY_BIT, DOUBLE, SINGLE, differences, distance


def record(*weights: float, metric: float = 1.0) -> Any:
    """A run of one weight, which begins with 0, and one value that is logged after its steps."""
    tensors = [{"w": torch.tensor([value], dtype=torch.float64)} for value in (0.0, *weights)]
    values = {"val/loss": {len(weights): metric}}
    return SimpleNamespace(weights=lambda: iter(tensors), paths=weights, values=values)


def test_the_largest_difference_is_found_with_its_first_step() -> None:
    found = differences(record(0.1, 0.2, 0.3), record(0.1, 0.25, 0.9), DOUBLE)
    assert (found["w"].is_equal, found["w"].step) == (False, 2)
    assert found["w"].distance == pytest.approx(0.6)
    assert found["val/loss"].is_equal


def test_rounding_is_no_difference() -> None:
    for far, tolerance in ((1e-14, DOUBLE), (1e-7, SINGLE)):
        assert differences(record(0.1), record(0.1 + far), tolerance)["w"].is_equal
    for far, tolerance in ((1e-7, DOUBLE), (1e-5, SINGLE)):
        assert not differences(record(0.1), record(0.1 + far), tolerance)["w"].is_equal


def test_by_bit_nothing_is_rounding() -> None:
    assert not differences(record(0.1), record(0.1 + 2e-17), BY_BIT)["w"].is_equal  # one bit
    assert differences(record(0.1), record(0.1), BY_BIT)["w"].is_equal


def test_what_rounding_does_to_one_process_it_may_do_to_others() -> None:
    """The control has begun with a weight that was moved; what else it has come to is rounding."""
    control = differences(record(0.1), record(0.1 * (1 + 1e-7) + 1e-8), DOUBLE, nudge=1e-7)
    assert control["w"].distance == pytest.approx(1e-8)
    for far, is_equal in ((2e-7, True), (4e-7, False)):
        found = differences(record(0.1), record(0.1 + far), DOUBLE, control)
        assert found["w"].is_equal == is_equal


def test_a_logged_value_differs_though_the_weights_do_not() -> None:
    for value in (1.001, float("nan"), float("inf")):
        found = differences(record(0.1, metric=1.0), record(0.1, metric=value), DOUBLE)
        assert found["w"].is_equal
        assert not found["val/loss"].is_equal
    lost = record(0.1)
    lost.values = {}
    assert not differences(record(0.1), lost, DOUBLE)["val/loss"].is_equal


def test_a_step_that_is_missing_is_a_difference() -> None:
    assert not differences(record(0.1, 0.2), record(0.1), DOUBLE)["number of steps"].is_equal


def test_tensors_of_two_shapes_are_infinitely_far() -> None:
    assert distance(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert distance(torch.zeros(0), torch.zeros(0)) == 0.0
