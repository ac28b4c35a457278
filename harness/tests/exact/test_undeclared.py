"""A loss that is a mean over something else than samples is told of; others are not."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.exact.undeclared import UndeclaredMeans, _difference
from harness.upstream.loss_graph import is_ratio_of_sums, terms_of

# Of each share its number of samples, and of its tokens.
SIZES = ((4, 7), (4, 19), (3, 5))


def share(num_samples: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (N, T, C) that need a gradient, labels (N, T) of which some are -100, a mask."""
    logits = torch.randn(num_samples, 6, 5, requires_grad=True)
    labels = torch.full((num_samples * 6,), -100)
    labels[:num_tokens] = torch.randint(0, 5, (num_tokens,))
    labels = labels.view(num_samples, 6)
    return logits, labels, (labels != -100).float()


def said(loss, sizes=SIZES) -> str:
    shares = []
    for num_samples, num_tokens in sizes:
        shares.append((terms_of(loss(*share(num_samples, num_tokens)) / 2, []), num_samples))
    return _difference(shares, 2)


def cross_entropy(logits: Tensor, labels: Tensor, **settings) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)


OVER_TOKENS = {
    "ignore_index": lambda x, y, m: cross_entropy(x, y),
    "label smoothing": lambda x, y, m: cross_entropy(x, y, label_smoothing=0.1),
    "class weights": lambda x, y, m: cross_entropy(x, y, weight=torch.arange(1.0, 6)),
    "mask": lambda x, y, m: (x.square().sum(-1) * m).sum() / m.sum(),
    "selected": lambda x, y, m: x[m.bool()].square().mean(),
    "times one over": lambda x, y, m: x[m.bool()].sum() * (1 / m.sum()),
}
OVER_SAMPLES = {
    "cross_entropy": lambda x, y, m: F.cross_entropy(x[:, 0], torch.zeros(len(x)).long()),
    "mean": lambda x, y, m: x.square().mean(),
    "mean of a sample's mean": lambda x, y, m: (
        (x[..., 0] * m).sum(1) / m.sum(1).clamp(min=1)
    ).mean(),
    "sum over number": lambda x, y, m: x.sum() / len(x),
    "bce": lambda x, y, m: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "of weights": lambda x, y, m: x.mean() + torch.ones(9, requires_grad=True).square().mean(),
}


def test_means_over_tokens_are_told() -> None:
    for name, loss in OVER_TOKENS.items():
        assert "is a mean over" in said(loss), name
        assert "mean_over(loss, number)" in said(loss), name
    assert "is a sum over samples" in said(lambda x, y, m: x.sum())


def test_sums_that_all_shares_divide_by_the_same_are_told() -> None:
    for divisors, sizes, is_told in (
        ((100, 100), (4, 4), False),  # may be a mean over 25 elements of each sample
        ((100, 100), (4, 3), True),
        ((5.5, 7), (4, 4), False),  # of two processes' objects together
        ((0.3, 0.7), (4, 4), True),  # a factor that changes
    ):
        looking = UndeclaredMeans(SimpleNamespace(world_size=2))
        for step, divisor in enumerate(divisors):
            assert not looking._of_one_divisor(1)
            looking.num_steps = step
            losses = [share(size, 7)[0].sum() / divisor for size in sizes]
            looking.shares = [(terms_of(x, []), n) for x, n in zip(losses, sizes, strict=True)]
        assert ("sum_over(sum, number)" in looking._of_one_divisor(1)) == is_told, divisors


def test_means_over_samples_are_not() -> None:
    assert {name: said(loss) for name, loss in OVER_SAMPLES.items() if said(loss)} == {}
    assert not said(OVER_SAMPLES["sum over number"], ((4, 9), (4, 9)))
    assert not said(OVER_TOKENS["ignore_index"], ((4, 9), (4, 9)))  # as many tokens do no harm


RATIOS = {
    "dice": lambda x, y, m: (
        1 - (2 * (x[..., 0].sigmoid() * m).sum() + 1) / (x[..., 0].sigmoid().sum() + m.sum() + 1)
    ),
    "of each class": lambda x, y, m: (
        1 - ((x.softmax(-1) * m[..., None]).sum((0, 1)) / x.softmax(-1).square().sum((0, 1))).mean()
    ),
}
NO_RATIOS = {
    "dice of each sample": lambda x, y, m: (
        1 - ((x.sum((1, 2)) + 1) / (x.square().sum((1, 2)) + 1)).mean()
    ),
    "learned weight": lambda x, y, m: x.mean() / torch.ones((), requires_grad=True).square(),
    "normalised": lambda x, y, m: (x / x.norm(dim=-1, keepdim=True)).square().mean(),
}


def of_batch(loss) -> bool:
    return is_ratio_of_sums(loss(*share(4, 7)) / 2, [], 4)


def test_ratios_of_sums_over_samples_are_told_and_other_quotients_are_not() -> None:
    for name, loss in (RATIOS | OVER_SAMPLES | NO_RATIOS | OVER_TOKENS).items():
        assert of_batch(loss) == (name in RATIOS), name
