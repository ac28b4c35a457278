"""``mean_over`` and ``sum_over``, for a loss that is not a mean over samples.

In: the loss of the local batch, and its number of tokens or objects, or its sum of weights. Out: a
loss with the value of the global batch, whose gradient is weighted by that number.

With accumulated batches, the number of the whole step is not known before its last batch. So each
batch divides by the number of the first batch. ``Means.correct`` corrects the gradients before the
optimizer's step. Next: ``GlobalBatches`` calls ``Means``.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from harness.data.loaders import world_size_and_rank
from harness.errors import UserError
from harness.kinds import sum_dtype

log = logging.getLogger(__name__)
# Autograd nodes through which a loss stays a multiple of its term: sums and factors.
LINEAR = {"AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0"}
LINEAR |= {"SumBackward0", "StackBackward0", "ToCopyBackward0", "SqueezeBackward0"}

Counter = Callable[[Tensor, Tensor | float, float | None], Tensor]
_counter: Counter | None = None  # ``Means.count`` while a run trains


def set_counter(counter: Counter | None) -> Counter | None:
    """Set the function that ``mean_over`` and ``sum_over`` call; return the previous one.

    The function is ``Means.count`` while a run trains, else None.
    """
    global _counter
    previous, _counter = _counter, counter
    return previous


def mean_over(loss: Tensor, weight: Tensor | float) -> Tensor:
    """Return the mean over the global batch of a loss that averages tokens, nodes or weights.

    The gradient is that of the global mean, for any number of ranks and accumulated batches.
    Without ``mean_over``, local batches are weighted by their numbers of samples. Example::

        num_tokens = (labels != -100).sum()
        loss = mean_over(F.cross_entropy(logits, labels, ignore_index=-100), num_tokens)

    Call it in every training step on every rank, even if the local batch has no token: this loss
    counts as 0. If the mean divides by ``mask.sum()``, write ``mask.sum().clamp(min=1)``.
    Outside of training ``mean_over`` returns ``loss``.

    Args:
        loss: a mean over the local batch, with one element. In a loss with several terms, each
            term may have its own weight.
        weight: the number of tokens or nodes in the local batch, or the sum of its weights.

    Returns:
        The mean over all ranks, to return, to log, or to use in a larger loss.

    Raises:
        UserError: an argument has more than one element, or the weight is negative; or batches are
            accumulated, and the loss has terms with different weights or without a weight.
    """
    return loss if _counter is None else _counter(loss, weight, None)


def sum_over(total: Tensor, number: Tensor | float = 0.0, at_least: float = 1.0) -> Tensor:
    """Return ``total / max(number, at_least)``, both summed over the global batch.

    Use it for a sum that is divided by something else than its number of terms. For example, a
    detector sums over all pixels, and divides by the number of objects. A local batch may have no
    object. Outside of training, ``sum_over`` divides the local values.

    Args:
        total: the sum over the local batch, with one element.
        number: the local batch's contribution to the divisor. By default the result is the sum.
        at_least: the smallest divisor.

    Returns:
        The loss of all ranks, to return, to log, or to use in a larger loss.

    Raises:
        UserError: as ``mean_over``; or ``at_least`` is not above 0.
    """
    if not at_least > 0:
        raise UserError(f"sum_over got at_least={at_least}: use a number above 0.")
    return (_counter or outside_of_training)(total, number, at_least)


def outside_of_training(loss: Tensor, number: Tensor | float, at_least: float | None) -> Tensor:
    """Return the result of ``mean_over`` (``at_least`` is None) or ``sum_over`` on one rank."""
    if at_least is None:
        return loss
    if not isinstance(number, Tensor):
        return loss / max(number, at_least)
    if number.dtype == torch.float64:
        number = number.to(sum_dtype(loss.device))
    return (loss / number.to(loss.device, non_blocking=True).clamp(min=at_least)).to(loss.dtype)


class Means:
    """Weight the terms of losses over the ranks, and over the accumulated batches of one step.

    ``weight`` returns the weight of the local batch. ``GlobalBatches`` multiplies the
    whole gradient by it, so ``count`` divides the gradient of each term by it.
    """

    def __init__(self, trainer: pl.Trainer, weight: Callable[[], float]) -> None:
        self.trainer, self.weight = trainer, weight
        self.num_processes = world_size_and_rank(trainer)[0]
        self.terms: list[Any] = []  # autograd nodes of the running batch's terms
        # For the accumulated batches: whether they have terms, the first divisor, and the sum.
        self.has_terms: bool | None = None
        self.first = self.total = torch.zeros(())
        self.at_least = 0.0
        self.lost: Tensor | float = 0.0  # sum of the losses that had the weight 0, but were not 0

    def count(self, loss: Tensor, weight: Tensor | float, at_least: float | None = None) -> Tensor:
        """Return the result of ``mean_over``, or with ``at_least`` that of ``sum_over``."""
        if not self.trainer.training:
            return outside_of_training(loss, weight, at_least)
        dtype, local = torch.promote_types(loss.dtype, torch.float32), self.weight()
        if isinstance(weight, Tensor):
            number = weight.detach().to(loss.device, dtype, non_blocking=True)
        else:  # ``as_tensor`` would synchronise
            number = torch.full((), weight, dtype=dtype, device=loss.device)
        check_arguments(loss, number, weight, "mean_over" if at_least is None else "sum_over")
        number = number.reshape(loss.shape) * bool(local)  # a batch of weight 0 is padding
        times = number if at_least is None else torch.full_like(number, bool(local))
        # A mean over nothing may be NaN.
        term = torch.where(times > 0, loss, torch.zeros_like(loss))
        lost = (loss - term).detach().abs().nan_to_num(0.0, 0.0).to(dtype) * bool(local)
        sums = torch.stack([term.detach().to(dtype) * times, number, lost])
        if self.num_processes > 1 and dist.is_initialized():
            dist.all_reduce(sums)  # strategy.reduce begins with a barrier
        summed, total, lost = sums
        self.lost = self.lost + lost
        num_batches = int(self.trainer.accumulate_grad_batches)
        if self.num_processes * num_batches == 1:
            return outside_of_training(term, number, at_least)
        divisor = total.clamp(min=at_least or 0.0)
        mean = torch.where(divisor > 0, summed / divisor, 0.0).to(loss.dtype)
        if num_batches > 1:
            if not self.has_terms:
                self.first, self.total = divisor.clamp(min=1), torch.zeros_like(total)
            divisor, self.total, self.at_least = self.first, self.total + total, at_least or 0.0
        if not term.requires_grad:
            return mean
        factor = (times * self.num_processes / divisor / (local or 1.0)).nan_to_num(0.0, 0.0)
        term.register_hook(lambda gradient: (gradient * factor).to(gradient.dtype))  # type: ignore[no-untyped-call]
        self.terms.append(term.grad_fn)
        # The value is global, so that a function of the result has the right derivative.
        return term + (mean - term).detach()

    def warn_of_lost(self) -> None:
        """Warn once if a loss that is not 0 had the weight 0, and so counted as 0."""
        if self.lost > 0:
            self.lost = -math.inf
            if self.trainer.is_global_zero:
                log.warning(
                    "mean_over got the weight 0 and a loss that is not 0: the loss counts as 0. "
                    "If your loss is a sum divided by another count, such as the number of "
                    "objects, return harness.sum_over(sum, count) instead."
                )

    def check(self, loss: Tensor) -> None:
        """Refuse an accumulated loss that is not a multiple of a single ``mean_over``.

        ``correct`` multiplies all gradients by one factor, so all terms need the same divisor.
        """
        terms, self.terms = self.terms, []
        before, self.has_terms = self.has_terms, bool(terms)
        if int(self.trainer.accumulate_grad_batches) == 1 or not (terms or before):
            return
        if len(terms) != 1 or before is False or not is_multiple(loss, terms[0]):
            raise UserError(
                f"trainer.accumulate_grad_batches={self.trainer.accumulate_grad_batches}, but the "
                "loss has several terms, of which mean_over weights only some, or weights them "
                "differently.\nUse trainer.accumulate_grad_batches=1, and a smaller batch."
            )

    def factor(self) -> Tensor:
        """Return the factor that corrects the gradients of all accumulated batches, and reset."""
        num_batches, has_terms = int(self.trainer.accumulate_grad_batches), self.has_terms
        self.has_terms = None
        if not has_terms or num_batches == 1:
            return torch.ones(())
        return (self.first * num_batches / self.total.clamp(min=self.at_least)).nan_to_num(0.0, 0.0)

    def correct(self, optimizer: Optimizer) -> None:
        """Divide the gradients of accumulated batches by the sum of their weights."""
        is_needed = self.has_terms and int(self.trainer.accumulate_grad_batches) > 1
        factor = self.factor()
        for group in optimizer.param_groups if is_needed else ():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.dtype))


def check_arguments(loss: Tensor, number: Tensor, given: Tensor | float, name: str) -> None:
    """Raise if an argument has several elements, or if a number on the host is negative."""
    if loss.numel() != 1 or number.numel() != 1:
        raise UserError(
            f"{name} got a loss of shape {tuple(loss.shape)} and a weight of shape "
            f"{tuple(number.shape)}.\nPass one number for each argument: mean_over(mean, weight), "
            "or sum_over(sum, divisor)."
        )
    is_on_host = not isinstance(given, Tensor) or given.device.type == "cpu"
    if is_on_host and not given >= 0:
        raise UserError(f"{name} got the weight {float(given)}: use 0 or a positive number.")


def is_multiple(loss: Tensor, term: Any) -> bool:
    """Return whether a loss is a multiple of a term, given as its autograd node."""
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is term:
            continue
        if node.name() not in LINEAR:
            return False
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    return True
