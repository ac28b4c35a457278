"""What a module gathers over processes by itself: right, or refused in a sentence."""

from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from harness.data.shared_batches import SharedBatchSampler
from harness.errors import UserError
from harness.exact.global_batches import Shares, shares_of
from harness.processes.agreement import gather
from harness.upstream.logged_values import NoCollectives

METHODS = ("all_gather", "validation_step", "test_step")


class Gathering:
    """Stand between a module and its strategy's ``all_gather`` and evaluation steps.

    A step of an evaluation has a batch that one process would have, so its tensors stay as they
    are. Elsewhere shapes are compared first where they may differ: gloo ends the process over
    unequal ones or joins garbage, and NCCL waits. In the last turn of an evaluation, in which some
    processes have no batch, a collective operation would wait for them.

    Args:
        trainer: of several processes.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.batch_idx: int | None = None  # of the training batch that runs
        self.is_whole = False  # this process has what all of them together would gather
        self.is_alone = False  # others have no batch in this turn
        self.refusal = ""  # of any call
        self.original, *steps = (getattr(trainer.strategy, name) for name in METHODS)
        replaced = [self, *(partial(self.step, step) for step in steps)]
        vars(trainer.strategy).update(zip(METHODS, replaced, strict=True))

    def remove(self) -> None:
        """Give the strategy its own methods back."""
        for name in METHODS:
            vars(self.trainer.strategy).pop(name, None)

    def begin_batch(self, sharing: Shares | None, batch_idx: int, dataloader_idx: int) -> None:
        """Know which batch runs."""
        is_training = bool(self.trainer.training)
        self.batch_idx = batch_idx if is_training else None
        self.is_whole = self.is_alone = False
        if not is_training and isinstance(sharing, SharedBatchSampler) and sharing.in_turn:
            is_last = len(sharing.totals) <= (batch_idx + 1) * sharing.num_ranks  # and not full
            is_split = is_last and (sharing.splits_last or batch_idx == 0)
            self.is_whole, self.is_alone = not is_split, is_last and not is_split
        model = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # DDP sends the first process's buffers in each forward; in an evaluation they stay.
            model.require_forward_param_sync = is_training or batch_idx + dataloader_idx == 0

    def end_batch(self) -> None:
        """What is gathered from here on is gathered as it is."""
        self.is_whole, self.batch_idx = False, None

    def step(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch; where others have none, nothing may be sent."""
        if not self.is_alone:
            return original(*args, **kwargs)
        with NoCollectives(partial(refuse, self.trainer)):
            return original(*args, **kwargs)

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
        return isinstance(only, SharedBatchSampler) and only.weight(self.batch_idx or 0) == 1.0


def refuse(trainer: pl.Trainer) -> None:
    """Say that processes have unequal numbers of batches."""
    kind = "test" if trainer.testing else "validation"
    raise UserError(
        f"{kind}_step waits for other processes, by torch.distributed or a metric with "
        "dist_sync_on_step=True, and some of them have one batch less.\n"
        "Leave it to the harness: log the value, append to a list of the module, or use "
        "self.all_gather, which gives a step its own whole batch."
    )
