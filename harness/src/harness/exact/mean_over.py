"""``mean_over`` and ``sum_over``, for a loss that is divided by something else than its samples.

In: a loss of this process's share and its number of tokens, objects or weights. Out: a loss with
the whole batch's value, whose gradient counts by that number. Batches that are accumulated for one
step divide by a number of the first one; ``Means.correct`` corrects their gradients as a whole
before the optimizer's step, when the number of all is known. Next: ``GlobalBatches`` calls it.
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

from harness.data.loaders import num_processes_and_rank
from harness.errors import UserError
from harness.kinds import sum_dtype

log = logging.getLogger(__name__)
# Nodes of the graph between a loss and its terms: sums of them, and factors.
LINEAR = {"AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0"}
LINEAR |= {"SumBackward0", "StackBackward0", "ToCopyBackward0", "SqueezeBackward0"}

Count = Callable[[Tensor, Tensor | float, float | None], Tensor]
_count: Count | None = None  # ``Means.count`` while a run trains


def use(count: Count | None) -> Count | None:
    """Set what losses call, as ``Means.count``, or ``None``; return what they called before."""
    global _count
    before, _count = _count, count
    return before


def mean_over(loss: Tensor, weight: Tensor | float) -> Tensor:
    """Say that a loss, or a term of it, is a mean over tokens, nodes or weights, not over samples.

    The gradient is that of the mean over the whole batch, however processes and accumulated batches
    share it; without this, shares are averaged by their numbers of samples::

        num_tokens = (labels != -100).sum()
        loss = mean_over(F.cross_entropy(logits, labels, ignore_index=-100), num_tokens)

    Call it in every training step of every process, also for a share that has no token at all: such
    a loss counts as 0. A mean that divides by ``mask.sum()`` needs ``.clamp(min=1)`` for that.
    Outside of a run's training it does nothing.

    Args:
        loss: a mean, with one element; of several terms each may have a weight of its own.
        weight: the number of what it is a mean over in this process's share, or the sum of its
            weights.

    Returns:
        The mean over all processes, to return, to log, or to use in a larger loss.

    Raises:
        UserError: if either has more than one element, if the weight is negative, or if batches are
            accumulated and the loss has terms with other weights, or with none.
    """
    return loss if _count is None else _count(loss, weight, None)


def sum_over(total: Tensor, number: Tensor | float = 0.0, at_least: float = 1.0) -> Tensor:
    """Divide a sum by a number, both of the whole batch, however processes share it.

    For a loss that is no mean over what it is divided by, such as a detector's sum over all pixels
    by the number of objects, of which a share may have none. Outside of a run's training it divides
    what it is given.

    Args:
        total: the sum over this process's share, with one element.
        number: what this share has of what it is divided by; without it, the sum stays one.
        at_least: what is divided by where the whole batch has less.

    Returns:
        ``total / max(number, at_least)`` of all processes, to use as that of ``mean_over``.

    Raises:
        UserError: as ``mean_over``; or if ``at_least`` is not above 0.
    """
    if not at_least > 0:
        raise UserError(f"sum_over was given at_least={at_least}: use a number above 0.")
    return (_count or outside_of_training)(total, number, at_least)


def outside_of_training(loss: Tensor, number: Tensor | float, at_least: float | None) -> Tensor:
    """Return what ``mean_over`` and ``sum_over`` do where nothing is shared."""
    if at_least is None:
        return loss
    if not isinstance(number, Tensor):
        return loss / max(number, at_least)
    if number.dtype == torch.float64:
        number = number.to(sum_dtype(loss.device))
    return (loss / number.to(loss.device, non_blocking=True).clamp(min=at_least)).to(loss.dtype)


class Means:
    """Weigh the terms of losses between processes, and between the batches of one step.

    ``weight`` returns the factor of this share, by which ``GlobalBatches.on_before_backward``
    multiplies the whole gradient, and which is divided out here.
    """

    def __init__(self, trainer: pl.Trainer, weight: Callable[[], float]) -> None:
        self.trainer, self.weight = trainer, weight
        self.num_processes = num_processes_and_rank(trainer)[0]
        self.terms: list[Any] = []  # nodes of the graph, of the batch that runs
        # Of the batches that are accumulated: whether they have terms, and what divides these.
        self.has_terms: bool | None = None
        self.first = self.total = torch.zeros(())
        self.at_least = 0.0
        self.lost: Tensor | float = 0.0  # losses, not 0, that were given the weight 0

    def count(self, loss: Tensor, weight: Tensor | float, at_least: float | None = None) -> Tensor:
        """Weigh a term as ``mean_over`` does, or with ``at_least`` as ``sum_over``."""
        if not self.trainer.training:
            return outside_of_training(loss, weight, at_least)
        dtype, share = torch.promote_types(loss.dtype, torch.float32), self.weight()
        if isinstance(weight, Tensor):
            number = weight.detach().to(loss.device, dtype, non_blocking=True)
        else:  # as_tensor would wait for the device
            number = torch.full((), weight, dtype=dtype, device=loss.device)
        refuse(loss, number, weight, "mean_over" if at_least is None else "sum_over")
        number = number.reshape(loss.shape) * bool(share)  # a share of weight 0 is padding
        times = number if at_least is None else torch.full_like(number, bool(share))
        term = torch.where(times > 0, loss, torch.zeros_like(loss))  # a mean over nothing is NaN
        lost = (loss - term).detach().abs().nan_to_num(0.0, 0.0).to(dtype) * bool(share)
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
        factor = (times * self.num_processes / divisor / (share or 1.0)).nan_to_num(0.0, 0.0)
        term.register_hook(lambda gradient: (gradient * factor).to(gradient.dtype))  # type: ignore[no-untyped-call]
        self.terms.append(term.grad_fn)
        # With the value of the whole batch a function of it has the right derivative.
        return term + (mean - term).detach()

    def warn_of_lost(self) -> None:
        """Warn, once, of a loss that counted as 0 because its weight was 0."""
        if self.lost > 0:
            self.lost = -math.inf
            if self.trainer.is_global_zero:
                log.warning(
                    "mean_over was given a loss that is not 0 and the weight 0: a mean over "
                    "nothing counts as 0. For a sum that is divided by another number than it has "
                    "terms, return sum_over(sum, number), from harness."
                )

    def check(self, loss: Tensor) -> None:
        """Refuse, before backward, accumulated losses whose terms are not of one kind.

        ``correct`` multiplies gradients as a whole, so all of them must come from such terms.
        """
        terms, self.terms = self.terms, []
        before, self.has_terms = self.has_terms, bool(terms)
        if int(self.trainer.accumulate_grad_batches) == 1 or not (terms or before):
            return
        if len(terms) != 1 or before is False or not is_multiple(loss, terms[0]):
            raise UserError(
                f"trainer.accumulate_grad_batches={self.trainer.accumulate_grad_batches}, and the "
                "loss has terms with other weights than that of one mean_over, or with none.\n"
                "Use trainer.accumulate_grad_batches=1, and a smaller batch."
            )

    def factor(self) -> Tensor:
        """Return the factor of the gradients of all accumulated batches, which it ends."""
        num_batches, has_terms = int(self.trainer.accumulate_grad_batches), self.has_terms
        self.has_terms = None
        if not has_terms or num_batches == 1:
            return torch.ones(())
        return (self.first * num_batches / self.total.clamp(min=self.at_least)).nan_to_num(0.0, 0.0)

    def correct(self, optimizer: Optimizer) -> None:
        """Divide, before the optimizer's step, by the weights of all accumulated batches."""
        is_needed = self.has_terms and int(self.trainer.accumulate_grad_batches) > 1
        factor = self.factor()
        for group in optimizer.param_groups if is_needed else ():
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.dtype))


def refuse(loss: Tensor, number: Tensor, given: Tensor | float, name: str) -> None:
    """Refuse what has several elements, and a negative number where looking is free."""
    if loss.numel() != 1 or number.numel() != 1:
        raise UserError(
            f"{name} was given a loss of shape {tuple(loss.shape)} and a weight of shape "
            f"{tuple(number.shape)}.\nGive it one number each: a mean, and what it is a mean over; "
            "or a sum, and what it is divided by."
        )
    is_on_host = not isinstance(given, Tensor) or given.device.type == "cpu"
    if is_on_host and not given >= 0:
        raise UserError(f"{name} was given the weight {float(given)}: use a number from 0 on.")


def is_multiple(loss: Tensor, term: Any) -> bool:
    """Return whether a loss is this node of its graph, added up and multiplied by constants."""
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is term:
            continue
        if node.name() not in LINEAR:
            return False
        nodes += [further for further, _ in node.next_functions if further is not None]
    return True
