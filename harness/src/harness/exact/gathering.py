"""What a module gathers or averages over processes, of whole batches, or shares of any size."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor

from harness.data.shared_batches import SharedBatchSampler
from harness.errors import UserError
from harness.exact.global_batches import shares_of
from harness.processes.agreement import gather


class Gathering:
    """Stands between a module and its strategy's ``all_gather`` and ``reduce``.

    A step of an evaluation has a batch that one process would have, so its tensors stay as they
    are, unless batches are split (limit_val_batches=0.5). Elsewhere shapes are compared first where
    they may differ: gloo ends the process over unequal ones or joins garbage, and NCCL waits. What
    ``self.log(..., sync_dist=True)`` of a training step averages is the mean over samples, or
    over the ``batch_size`` that is logged with it.

    Args:
        trainer: of several processes.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.original = trainer.strategy.all_gather
        self.is_whole = False  # this process has what all of them together would gather
        self.batch_idx: int | None = None  # of the training batch that runs
        self.num_samples: int | None = None  # of this process's share of it, 0 in a filler
        self.weight: Any = None  # logged as batch_size with what is reduced next
        self.refusal = ""  # of any call
        self.original_reduce = trainer.strategy.reduce
        vars(trainer.strategy).update(all_gather=self, reduce=self.reduce)

    def remove(self) -> None:
        """Give the strategy its own method back."""
        for name in ("all_gather", "reduce"):
            vars(self.trainer.strategy).pop(name, None)

    def __call__(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather a tensor, (...) to (processes, ...), as ``LightningModule.all_gather`` does.

        Raises:
            UserError: in every process, if the shapes differ.
        """
        if self.refusal:
            raise UserError(self.refusal)
        if self.is_whole:
            return tensor
        if not self._is_even() and group in (None, dist.group.WORLD):
            shapes = gather(self.trainer, tuple(tensor.shape))
            if any(shape != shapes[0] for shape in shapes):
                raise UserError(
                    "self.all_gather needs one shape in all processes, and they have "
                    f"{', '.join(map(str, shapes))}.\n"
                    "In training, use a batch size that the processes divide, with drop_last=True. "
                    "At the end of an evaluation, append to a list of the module instead: lists "
                    "are gathered."
                )
        return self.original(tensor, group=group, sync_grads=sync_grads)

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the processes, as the strategy does."""
        given, self.weight = self.weight, None
        is_share = self.batch_idx is not None and reduce_op in ("mean", "avg")
        weight = self.num_samples if given is None else given
        if not is_share or weight is None or (given is None and self._is_even()):
            return self.original_reduce(tensor, group=group, reduce_op=reduce_op)
        weight = torch.as_tensor(weight, dtype=tensor.dtype, device=tensor.device).reshape(1)
        weighted = torch.where(weight > 0, tensor.flatten() * weight, 0.0)  # a mean of none is NaN
        parts = self.original_reduce(torch.cat([weighted, weight]), group=group, reduce_op="sum")
        return torch.where(parts[-1] > 0, parts[:-1] / parts[-1], tensor.flatten()).view_as(tensor)

    def _is_even(self) -> bool:
        """Whether the shares of the running batch are of one size."""
        # Of several loaders the shares may differ in size, each in its own way.
        only = None if self.batch_idx is None else shares_of(self.trainer.train_dataloader)
        return isinstance(only, SharedBatchSampler) and only.weight(self.batch_idx or 0) == 1.0
