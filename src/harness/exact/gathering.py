"""``self.all_gather`` of a module, where processes have whole batches, or shares of any size."""

from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist
from torch import Tensor

from harness.data.batches import SplitBatches
from harness.errors import UserError
from harness.exact.global_batches import shares_of
from harness.processes.agreement import gather


class Gathering:
    """Stands between a module and its strategy's ``all_gather``.

    A step of an evaluation has a batch that one process would have, so its tensors stay as they
    are, unless batches are split (limit_val_batches=0.5). Elsewhere shapes are compared first where
    they may differ: gloo ends the process over unequal ones or joins garbage, and NCCL waits.

    Args:
        trainer: of several processes.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.original = trainer.strategy.all_gather
        self.is_whole = False  # this process has what all of them together would gather
        self.batch_idx: int | None = None  # of the training batch that runs
        self.refusal = ""  # of any call
        vars(trainer.strategy)["all_gather"] = self

    def remove(self) -> None:
        """Give the strategy its own method back."""
        vars(self.trainer.strategy).pop("all_gather", None)

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

    def _is_even(self) -> bool:
        """Whether the shares of the running batch are of one size."""
        # Of several loaders the shares may differ in size, each in its own way.
        only = None if self.batch_idx is None else shares_of(self.trainer.train_dataloader)
        return isinstance(only, SplitBatches) and only.weight(self.batch_idx or 0) == 1.0
