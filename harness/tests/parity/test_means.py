"""Errors and warnings of ``mean_over`` and ``sum_over``; test_advice.py trains with them."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from harness import mean_over, sum_over
from harness.errors import UserError
from harness.parity import mean_over as means
from harness.parity.mean_over import Means


def running(num_batches: int = 1) -> Means:
    """Return the state of one process whose losses call it."""
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 1, "rank": 0})
    trainer = SimpleNamespace(
        strategy=strategy, accumulate_grad_batches=num_batches, training=True, is_global_zero=True
    )
    found = Means(trainer, lambda: 1.0)
    means.set_counter(found.count)
    return found


@pytest.fixture(autouse=True)
def nothing_runs():
    yield
    means.set_counter(None)


def test_accumulated_batches_need_one_kind_of_term() -> None:
    def term(loss: Tensor) -> Tensor:
        return mean_over(loss, 3.0)

    for make in (
        lambda other: term(other) + other,
        lambda other: term(other) + term(2 * other),
        lambda other: term(other) * other.exp(),  # a learned factor
        lambda other: other,
    ):
        process = running(num_batches=2)
        weight = torch.ones((), requires_grad=True)
        process.check(-0.5 * term(2 * weight) / 2)
        with pytest.raises(UserError, match="accumulate_grad_batches=1"):
            process.check(make(weight) / 2)


def test_a_loss_that_the_weight_0_takes_away_is_told_once(caplog) -> None:
    process = running()
    mean_over(torch.zeros(()), 0)
    mean_over(torch.full((), torch.nan), 0)
    mean_over(torch.ones(()), 1)
    process.warn_of_lost()
    assert not caplog.records
    for _ in range(2):
        mean_over(torch.ones(()), 0)
        process.warn_of_lost()
    (record,) = caplog.records
    assert "sum_over(sum, count)" in record.getMessage()


def test_outside_of_training_a_mean_stays_and_a_sum_is_divided() -> None:
    total, value = torch.full((), 6.0), torch.full((), 3.0)
    assert mean_over(total, 3) is total
    assert sum_over(total, 2) == value  # outside of a run
    assert sum_over(total, torch.tensor(0)) == total
    process = running()
    assert sum_over(total, 2) == sum_over(total, 0, at_least=2) == value
    process.trainer.training = False
    assert mean_over(total, 3) is total
    assert sum_over(total, 2) == value
    with pytest.raises(UserError, match="use a number above 0"):
        sum_over(total, 2, at_least=0)


def test_a_term_and_one_number_from_0_on_are_asked_for() -> None:
    running()
    loss = torch.ones(3, requires_grad=True)
    with pytest.raises(UserError, match=r"shape \(3,\)"):
        mean_over(loss.sum(), torch.ones(3))
    with pytest.raises(UserError, match="one number for each"):
        mean_over(loss, 3)
    for weight in (-1.0, float("nan"), torch.tensor(-2)):
        with pytest.raises(UserError, match="use 0 or a positive number"):
            mean_over(loss.sum(), weight)
