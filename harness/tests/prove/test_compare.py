"""Where two runs differ, and what is rounding."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.prove.compare import BY_BIT, DOUBLE, SINGLE, Difference, differences, distance


def record(weight: float, metric: float = 1.0) -> Any:
    """What a run of one weight has come to, with one value that was logged."""
    weights = {"w": torch.tensor([weight], dtype=torch.float64)}
    return SimpleNamespace(weights=weights, values={"val/loss": torch.tensor([[3.0, metric]])})


def test_the_difference_is_a_share_of_the_number() -> None:
    found = differences(record(2.0), record(2.5), DOUBLE, {})
    assert not found["w"].is_equal
    assert found["w"].distance == pytest.approx(0.25)
    assert found["val/loss"].is_equal


def test_rounding_is_no_difference() -> None:
    for far, tolerance in ((1e-10, DOUBLE), (1e-7, SINGLE)):
        assert differences(record(0.1), record(0.1 + far), tolerance, {})["w"].is_equal
    for far, tolerance in ((1e-7, DOUBLE), (1e-5, SINGLE)):
        assert not differences(record(0.1), record(0.1 + far), tolerance, {})["w"].is_equal


def test_by_bit_nothing_is_rounding() -> None:
    assert not differences(record(0.1), record(0.1 + 2e-17), BY_BIT, {})["w"].is_equal  # one bit
    assert differences(record(0.1), record(0.1), BY_BIT, {})["w"].is_equal


def test_what_rounding_does_to_one_process_it_may_do_to_others() -> None:
    control = {"w": Difference(False, 1e-8)}
    for far, is_equal in ((2e-7, True), (4e-7, False)):
        found = differences(record(0.1), record(0.1 + far), DOUBLE, control)
        assert found["w"].is_equal == is_equal


def test_a_logged_value_differs_though_the_weights_do_not() -> None:
    for value in (1.001, float("nan"), float("inf")):
        found = differences(record(0.1, 1.0), record(0.1, value), DOUBLE, {})
        assert found["w"].is_equal
        assert not found["val/loss"].is_equal
    lost = record(0.1)
    lost.values = {}
    assert not differences(record(0.1), lost, DOUBLE, {})["val/loss"].is_equal
    assert not differences(lost, record(0.1), DOUBLE, {})["val/loss"].is_equal


def test_tensors_of_two_shapes_are_infinitely_far() -> None:
    assert distance(torch.zeros(2), torch.zeros(3)) == float("inf")
    assert distance(torch.zeros(0), torch.zeros(0)) == 0.0
