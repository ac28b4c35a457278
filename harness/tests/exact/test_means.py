"""A loss that says what it is a mean over has the gradient of the whole batch."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from harness import mean_over, sum_over
from harness.errors import UserError
from harness.exact import mean_over as means
from harness.exact.mean_over import Means


def running(num_processes: int, num_batches: int, share: float = 1.0, total=None) -> Means:
    """What a process has; ``total`` is what its all-reduce gives."""
    strategy = SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": num_processes, "rank": 0},
        reduce=lambda mine, reduce_op: torch.as_tensor([0.0, total, 0.0], dtype=mine.dtype),
    )
    trainer = SimpleNamespace(
        strategy=strategy,
        accumulate_grad_batches=num_batches,
        training=True,
        is_global_zero=True,
    )
    found = Means(trainer, lambda: share)
    means.use(found.count)
    return found


@pytest.fixture(autouse=True)
def nothing_runs():
    yield
    means.use(None)


@pytest.mark.parametrize("is_sum", [False, True], ids=["mean", "sum"])
def test_gradient_is_that_of_the_whole_batch(is_sum: bool) -> None:
    """Also where shares differ in samples, and where some have no token, or no object."""
    for num_processes, num_batches in itertools.product((1, 2, 3), (1, 2, 4)):
        for empty in ((), (0,), (0, 1)):
            if is_sum or len(empty) < num_processes * num_batches:  # else it has no gradient
                check_gradient(num_processes, num_batches, empty, is_sum)


def check_gradient(num_processes: int, num_batches: int, empty: tuple, is_sum: bool) -> None:
    torch.manual_seed(num_processes * 10 + num_batches)
    num_shares = num_processes * num_batches
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    sizes = [0 if i in empty else 1 + 2 * i for i in range(num_shares)]
    tokens = [torch.randn(size, 3, dtype=torch.float64) for size in sizes]
    pixels = torch.randn(num_shares, 7, 3, dtype=torch.float64)  # a share has them in any case
    if is_sum:
        whole = (pixels @ weight).tanh().sum() / max(sum(sizes), 5.0)
    else:
        whole = (torch.cat(tokens) @ weight).tanh().mean()
    whole.backward()
    expected, weight.grad = weight.grad.clone(), None
    shares = torch.rand(num_batches, num_processes, dtype=torch.float64) + 0.5
    if num_shares == 1:
        shares.fill_(1)

    total = torch.zeros(3, dtype=torch.float64)
    for rank in range(num_processes):
        for micro in range(num_batches):
            of_batch = sum(sizes[micro * num_processes : (micro + 1) * num_processes])
            share = float(shares[micro, rank])
            if micro == 0:
                process = running(num_processes, num_batches, share, of_batch)
            process.weight = lambda share=share: share
            process.trainer.strategy.reduce = lambda mine, reduce_op, of_batch=of_batch: (
                torch.tensor([0.0, float(of_batch), 0.0], dtype=mine.dtype)
            )
            mine = tokens[micro * num_processes + rank]
            if is_sum:
                own = pixels[micro * num_processes + rank]
                loss = sum_over((own @ weight).tanh().sum(), len(mine), at_least=5.0) / num_batches
            else:
                loss = mean_over((mine @ weight).tanh().mean(), len(mine)) / num_batches
            assert loss.isfinite()
            process.check(loss)
            # What GlobalBatches does to the whole loss.
            loss.register_hook(lambda gradient, share=share: gradient * share)
            loss.backward()
        process.correct(torch.optim.SGD([weight], lr=1))
        total += weight.grad / num_processes
        weight.grad = None
    assert torch.allclose(total, expected, rtol=1e-12, atol=1e-14)


def test_several_terms_have_weights_of_their_own() -> None:
    """Masked tokens, and a sentence task that is a mean over samples."""
    running(2, 1, share=1.2, total=10.0)
    weight = torch.ones((), requires_grad=True)
    loss = mean_over(3 * weight, 4.0) + 5 * weight
    loss.register_hook(lambda gradient: gradient * 1.2)
    loss.backward()
    assert weight.grad == pytest.approx(3 * 4 * 2 / 10 + 5 * 1.2)


def test_accumulated_batches_need_one_kind_of_term() -> None:
    def term(loss: Tensor) -> Tensor:
        return mean_over(loss, 3.0)

    for make in (
        lambda other: term(other) + other,
        lambda other: term(other) + term(2 * other),
        lambda other: term(other) * other.exp(),  # a learned factor
        lambda other: other,
    ):
        process = running(1, 2)
        weight = torch.ones((), requires_grad=True)
        process.check(-0.5 * term(2 * weight) / 2)
        with pytest.raises(UserError, match="accumulate_grad_batches=1"):
            process.check(make(weight) / 2)


def test_a_loss_that_the_weight_0_takes_away_is_told_once(caplog) -> None:
    process = running(1, 1)
    mean_over(torch.zeros(()), 0)
    mean_over(torch.full((), torch.nan), 0)
    mean_over(torch.ones(()), 1)
    process.warn_of_lost()
    assert not caplog.records
    for _ in range(2):
        mean_over(torch.ones(()), 0)
        process.warn_of_lost()
    (record,) = caplog.records
    assert "return sum_over(sum, number)" in record.getMessage()


def test_outside_of_training_a_mean_stays_and_a_sum_is_divided() -> None:
    total, value = torch.full((), 6.0), torch.full((), 3.0)
    assert mean_over(total, 3) is total
    assert sum_over(total, 2) == value  # outside of a run
    assert sum_over(total, torch.tensor(0)) == total
    process = running(1, 1)
    assert sum_over(total, 2) == value
    assert sum_over(total, 0, at_least=2) == value
    process.trainer.training = False
    assert mean_over(total, 3) is total
    assert sum_over(total, 2) == value
    with pytest.raises(UserError, match="use a number above 0"):
        sum_over(total, 2, at_least=0)


def test_a_term_and_one_number_from_0_on_are_asked_for() -> None:
    running(2, 1, total=6.0)
    loss = torch.ones(3, requires_grad=True)
    with pytest.raises(UserError, match=r"shape \(3,\)"):
        mean_over(loss.sum(), torch.ones(3))
    with pytest.raises(UserError, match="one number each"):
        mean_over(loss, 3)
    for weight in (-1.0, float("nan"), torch.tensor(-2)):
        with pytest.raises(UserError, match="from 0 on"):
            mean_over(loss.sum(), weight)
