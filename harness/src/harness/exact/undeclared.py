"""Losses that are no mean over samples, and do not say so."""

import logging
from itertools import combinations
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from harness.processes.agreement import gather
from harness.upstream.loss_graph import Term, is_ratio_of_sums, terms_of

log = logging.getLogger(__name__)
STEPS = (0, 1, 2, 10, 100, 1000)  # in which losses are looked at
SAME = 1e-6
RATIO = (
    "divides one sum over the samples of a batch by another, as a Dice loss over a batch does: a "
    "share of a batch gives another loss, and the weights will be others than those of one process."
    "\nUse strategy=dp or ddp2, divide for each sample, or gather what is summed: "
    "self.all_gather(x, sync_grads=True).flatten(0, -2)."
)

Share = tuple[list[Term], int]  # the terms of its loss, and its number of samples, or 0


class UndeclaredMeans:
    """Tell of a loss that processes, or accumulated batches, average by the wrong weights.

    The graph of a loss says what it divides by: the total weight of a cross-entropy, the size of
    a mean, a sum of a mask. Where that is in no fixed proportion to the samples of the shares, the
    loss is a mean over something else. The shares of a few steps are compared.

    Args:
        trainer: of several processes, or accumulated batches.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.shares: list[Share] = []
        self.num_steps, self.has_seen_uneven, self.is_told = 0, False, False
        self.is_looking = False
        self.divisors: dict[int, tuple[int, float]] = {}  # by term, the first step's, and which

    def begin_batch(self, batch_idx: int, is_uneven: bool) -> None:
        """Choose whether the losses of a batch are looked at; the same in every process."""
        if batch_idx % int(self.trainer.accumulate_grad_batches) == 0:
            is_new = is_uneven and not self.has_seen_uneven
            self.is_looking = not self.is_told and (self.num_steps in STEPS or is_new)
            self.has_seen_uneven |= is_uneven
            self.num_steps += 1
            self.shares = []

    def look(self, loss: Tensor, declared: list[Any], num_samples: int | None) -> None:
        """Before a loss flows back: compare it with those of the other shares."""
        mine = (terms_of(loss, declared), num_samples or 0)
        if not self.trainer.lightning_module.automatic_optimization:
            self.shares = []  # each loss has a name of its own there
        self.shares += gather(self.trainer, mine)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        unit = int(self.trainer.accumulate_grad_batches) / (scaler.get_scale() if scaler else 1)
        said = _difference(self.shares, unit) or self._of_one_divisor(unit)
        if num_samples and is_ratio_of_sums(loss, declared, num_samples):
            said = RATIO
        if not self.is_told and said:
            self.is_told = True
            if self.trainer.is_global_zero:
                log.warning("The loss of %s %s", type(self.trainer.lightning_module).__name__, said)

    def _of_one_divisor(self, unit: float) -> str:
        """What is to be said where all shares divide a sum by the same; empty where nothing is.

        A number that changes from step to step, and of which the processes have whole multiples, is
        that of all processes, as an all-reduce makes it: even shares are right then.
        """
        sizes = [size for _, size in self.shares]
        for i, terms in enumerate(_by_term(self.shares)):
            divisors = [term.denominator / unit for term in terms]
            now = divisors[0]
            if [term.num_rows for term in terms] != sizes or not all(
                _is_same(one, now) for one in divisors
            ):
                continue
            step, before = self.divisors.setdefault(i, (self.num_steps, now))
            is_even = len({*sizes}) == 1
            multiples = [number * self.trainer.world_size for number in (before, now)]
            is_of_all = before != now and all(_is_same(one, round(one)) for one in multiples)
            if step == self.num_steps or (is_even and (is_of_all or now >= sizes[0])):
                continue
            return (
                f"divides a sum over samples by {now:.6g} in every share, of {max(sizes)} samples "
                f"as of {min(sizes)}, and shares are averaged: the weights will be others than "
                "those of one process.\nIf that is a number of the batch, such as its objects, "
                "return sum_over(sum, number), from harness, of this process's own samples. If it "
                "is a constant, return sum_over(loss)."
            )
        return ""


def _difference(shares: list[Share], unit: float) -> str:
    """What is to be said of a step's shares; empty where nothing is.

    Every loss has been divided by ``unit``.
    """
    for terms in _by_term(shares):
        sizes = [size for _, size in shares]
        if len({term.name for term in terms}) > 1:
            return ""
        for i, j in combinations(range(len(shares)), 2):
            a, b = terms[i].denominator / unit, terms[j].denominator / unit
            is_of_samples = terms[i].num_rows == sizes[i] and terms[j].num_rows == sizes[j]
            if is_of_samples and _is_same(a, b) and _is_same(a, 1):
                return (
                    "is a sum over samples, and shares are averaged: the weights will be others "
                    "than those of one process.\nDivide it by the number of samples, or return "
                    "sum_over(loss), from harness."
                )
            if terms[i].num_classes != terms[j].num_classes:
                return (
                    "compares the samples of a batch with each other: shares of "
                    f"{sizes[i]} and {sizes[j]} samples have {terms[i].num_classes} and "
                    f"{terms[j].num_classes} classes. It is another loss on a part of a batch, "
                    "and the weights will be others than those of one process.\n"
                    "Use strategy=dp or ddp2, or gather what is compared, and its labels: "
                    "self.all_gather(x, sync_grads=True).flatten(0, -2)."
                )
            if not _is_same(a, b) and not _is_same(a / sizes[i], b / sizes[j]):
                return (
                    f"divides by {a:.6g} and {b:.6g} in shares of {sizes[i]} and {sizes[j]} "
                    f"samples ({terms[i].name}): it is no mean over samples, and the weights will "
                    "be others than those of one process.\n"
                    "Say what it is a mean over: return mean_over(loss, number), from harness; or "
                    "sum_over(sum, number), where the sum has other terms than these. See 'Any "
                    "loss' in harness/docs/strategies.md."
                )
    return ""


def _by_term(shares: list[Share]) -> list[tuple[Term, ...]]:
    """Each term in all shares; nothing where they have unequal numbers of them, or no samples."""
    if len({len(terms) for terms, _ in shares}) > 1 or not all(size for _, size in shares):
        return []
    return [*zip(*(terms for terms, _ in shares), strict=True)]


def _is_same(a: float, b: float) -> bool:
    return abs(a - b) <= SAME * max(abs(a), abs(b))
