"""What a loss is a mean over, or divided by, where that is not the samples of a batch."""

import logging
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from harness.data.loading import processes
from harness.errors import UserError

log = logging.getLogger(__name__)
# Between a loss and its terms: sums of them, and factors.
LINEAR = {"AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0"}
LINEAR |= {"SumBackward0", "StackBackward0", "ToCopyBackward0", "SqueezeBackward0"}

_running: "Denominators | None" = None  # while a run trains


def mean_over(loss: Tensor, weight: Tensor | float) -> Tensor:
    """Say that a loss, or a term of it, is a mean over tokens, nodes or weights, not over samples.

    Without it the shares of a batch are averaged by their numbers of samples. With it the gradient
    is that of the mean over the whole batch, however processes and accumulated batches share it::

        num_tokens = (labels != -100).sum()
        loss = mean_over(F.cross_entropy(logits, labels, ignore_index=-100), num_tokens)
        self.log("train/loss", loss, batch_size=num_tokens)
        return loss

    Call it in every training step of every process, also for a share that has no token at all: such
    a loss counts as 0. A mean that divides by ``mask.sum()`` needs ``.clamp(min=1)`` for that.
    Outside of a run's training it does nothing. A sum over more than what it is divided by, such as
    a detector's over all pixels by the number of objects, is no mean: see ``sum_over``.

    Args:
        loss: a mean, with one element.
        weight: what it is a mean over, in this process's share: a number of tokens or nodes, or the
            sum of the weights of ``torch.nn.functional.cross_entropy(weight=...)``.

    Returns:
        The mean over all processes, to return, to log, or to use in a larger loss: several terms
        may each have a weight of their own.

    Raises:
        UserError: if either has more than one element, if the weight is negative, or if batches are
            accumulated and the loss has terms with other weights, or with none.
    """
    if _running is None:
        return loss
    return _running.count(loss, weight)


def sum_over(total: Tensor, number: Tensor | float, at_least: float = 1.0) -> Tensor:
    """Divide a sum by a number, both of the whole batch, however processes share it.

    For a loss that is not a mean over what it is divided by: a detector's sum over all pixels,
    divided by the number of objects, of which a share of the batch may have none::

        loss = sum_over(focal.sum(), num_objects)
        self.log("train/loss", loss)
        return loss

    Call it in every training step of every process. Outside of a run's training it divides what it
    is given.

    Args:
        total: the sum over this process's share, with one element.
        number: what this share has of what it is divided by: objects, tokens, or weights.
        at_least: what is divided by where the whole batch has less.

    Returns:
        ``total / max(number, at_least)`` of all processes, to return, to log, or to use in a larger
        loss.

    Raises:
        UserError: as ``mean_over``; or if ``at_least`` is not above 0.
    """
    if not at_least > 0:
        raise UserError(f"sum_over was given at_least={at_least}: use a number above 0.")
    if _running is None:
        return _quotient(total, number, at_least)
    return _running.count(total, number, at_least)


class Denominators:
    """Weigh the terms of losses between processes, and between the batches of one step.

    Args:
        trainer: knows the processes, and what is accumulated.
        weight: the factor by which this share's whole gradient is multiplied elsewhere.
    """

    def __init__(self, trainer: pl.Trainer, weight: Callable[[], float]) -> None:
        self.trainer, self.weight = trainer, weight
        self.num_processes = processes(trainer)[0]
        self.terms: list[Any] = []  # nodes of the graph, of the batch that runs
        # Of the batches that are accumulated: whether they have terms, and the terms' weights.
        self.has_terms: bool | None = None
        self.first = self.total = torch.zeros(())
        self.at_least = 0.0  # what the accumulated weights are together
        self.lost: Tensor | None = None  # losses that were given the weight 0, in all processes
        self.is_told = False

    def start(self) -> None:
        """Let ``mean_over`` find this run."""
        global _running
        _running = self

    def end(self) -> None:
        """Let ``mean_over`` do nothing any more."""
        global _running
        _running = None

    def count(self, loss: Tensor, weight: Tensor | float, at_least: float | None = None) -> Tensor:
        """See ``mean_over``; with ``at_least`` see ``sum_over``."""
        is_sum, at_least = at_least is not None, at_least or 0.0
        if not self.trainer.training:
            return _quotient(loss, weight, at_least) if is_sum else loss
        name = "sum_over" if is_sum else "mean_over"
        dtype = torch.promote_types(loss.dtype, torch.float32)
        mine = torch.as_tensor(weight, dtype=dtype, device=loss.device).detach()
        if loss.numel() != 1 or mine.numel() != 1:
            raise UserError(
                f"{name} was given a loss of shape {tuple(loss.shape)} and a weight of shape "
                f"{tuple(mine.shape)}.\nGive it the {'sum' if is_sum else 'mean'}, and one number "
                f"that it is {'divided by' if is_sum else 'a mean over'}."
            )
        if mine.device.type == "cpu" and not mine >= 0:
            raise UserError(f"{name} was given the weight {float(mine)}: use a number from 0 on.")
        if self.terms and loss.grad_fn and _is_made_of(loss, self.terms):
            raise UserError(f"{name} was given what was returned: call it once for each term.")
        num_batches, share = int(self.trainer.accumulate_grad_batches), self.weight()
        mine = mine.reshape(loss.shape)
        if share == 0:  # the sample of another process
            mine = torch.zeros_like(mine)
        # The mean over nothing is NaN; a sum is a sum.
        is_counted = torch.full_like(mine, share != 0, dtype=torch.bool) if is_sum else mine > 0
        counted = torch.where(is_counted, loss, torch.zeros_like(loss))
        times, total = 1.0 if is_sum else mine, mine.clone()
        lost = (loss - counted).detach().abs().nan_to_num(0.0, 0.0).to(dtype) * bool(share)
        value = _quotient(counted, mine, at_least) if is_sum else counted
        if self.num_processes > 1:
            sums = torch.stack([counted.detach().to(dtype) * times, mine, lost])
            weighted, total, lost = self.trainer.strategy.reduce(sums, reduce_op="sum")
            divisor = total.clamp(min=at_least)
            value = torch.where(divisor > 0, weighted / divisor, 0.0).to(loss.dtype)
        self._notice(lost)
        if self.num_processes * num_batches == 1:
            return value
        first = total.clamp(min=at_least)
        if num_batches > 1:
            if self.has_terms:
                first = torch.where(self.first > 0, self.first, first)
            self.first, self.total = first, self.total + total if self.has_terms else total
            self.at_least = at_least
        if not counted.requires_grad:
            return value
        factor = (times * self.num_processes / first / (share or 1.0)).nan_to_num(0.0, 0.0)
        counted.register_hook(lambda gradient: (gradient * factor).to(gradient.dtype))  # type: ignore[no-untyped-call]
        self.terms.append(counted.grad_fn)
        # With the value of the whole batch a function of it has the whole's derivative.
        return counted + (value - counted).detach()

    def _notice(self, lost: Tensor) -> None:
        """Remember what was given the weight 0; only on a CPU is looking free."""
        self.lost = lost if self.lost is None else self.lost + lost
        if lost.device.type == "cpu":
            self.tell()

    def tell(self) -> None:
        """Warn, once, of a loss that was no mean, and counted as 0 where its weight was 0."""
        if self.is_told or self.lost is None or not self.lost > 0:
            return
        self.is_told = True
        if self.trainer.is_global_zero:
            log.warning(
                "mean_over was given a loss that is not 0 and the weight 0: a mean over nothing "
                "counts as 0. A sum that is divided by another number than it has terms, as of all "
                "pixels by that of objects, is no mean: return sum_over(sum, number), from harness."
            )

    def check(self, loss: Tensor) -> None:
        """Before backward: refuse what accumulated batches cannot be weighed by.

        The sum of all weights is known after the last batch of a step only. Then gradients are
        corrected as a whole, so all of them must have come from terms of one kind.
        """
        terms, self.terms = self.terms, []
        if not terms and not self.has_terms:
            self.has_terms = False
            return
        if int(self.trainer.accumulate_grad_batches) == 1:
            return
        if len(terms) != 1 or self.has_terms is False or not _is_made_of(loss, terms):
            raise UserError(
                f"trainer.accumulate_grad_batches={self.trainer.accumulate_grad_batches}, and the "
                "loss has terms with other weights than that of one mean_over, or with none.\n"
                "Use trainer.accumulate_grad_batches=1, and a smaller batch."
            )
        self.has_terms = True

    def correct(self, optimizer: Optimizer) -> None:
        """Before the optimizer's step: divide by the weights of all accumulated batches."""
        if self.has_terms:
            num_batches = int(self.trainer.accumulate_grad_batches)
            total = self.total.clamp(min=self.at_least)
            factor = (self.first * num_batches / total).nan_to_num(0.0, 0.0)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor.to(parameter.grad.dtype))
        self.has_terms = None


def _quotient(total: Tensor, number: Tensor | float, at_least: float) -> Tensor:
    divisor = torch.as_tensor(number, device=total.device).clamp(min=at_least)
    return (total / divisor).to(total.dtype)


def _is_made_of(loss: Tensor, terms: list[Any]) -> bool:
    """Whether a loss has nothing but these terms, added up and multiplied by constants."""
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if any(node is term for term in terms):
            continue
        if node.name() not in LINEAR:
            return False
        nodes += [further for further, _ in node.next_functions if further is not None]
    return True
