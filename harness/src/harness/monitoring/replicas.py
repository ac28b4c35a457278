"""Compare the replicas of the model that the processes of a run hold."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from harness.display import join_first
from harness.errors import TrainingError
from harness.kinds import RUNNING_STATS_NORMS
from harness.sharded import is_sharded
from harness.strategies.sync_batch_norm import SyncBatchNorm

log = logging.getLogger(__name__)
UNUSED = (
    "these parameters have no part in the loss, and DDP has not averaged all gradients: {}.\n"
    "Use or freeze them, or, as for both networks of a GAN, set "
    "trainer.strategy.find_unused_parameters=true."
)
CAUSES = (
    "Something changes the model in one process alone: code under `if rank == 0`, a parameter that "
    "DDP does not know, or what is computed from one process's data."
)
SEVERAL = (
    "Where training_step calls manual_backward for one of several networks, as of a GAN, set "
    "trainer.strategy.find_unused_parameters=true. Else: "
)
OWN = (
    "Buffer %s of %s is written by each process from its own samples, and process 0's is kept. "
    "Gather them first, as in x = self.all_gather(x).flatten(0, -2)."
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element
CHUNK = 2**22  # elements that are summed at once: 32 MiB


def sums_of_bits(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum the bits of each tensor, viewed as integers, on its device: shape (len(tensors),).

    A sum of 64 bits makes a copy of 64 bits, so that one of a whole tensor would need twice the
    memory of its numbers.
    """
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for i, tensor in enumerate(tensors):
        # In the order of the memory, as of channels_last weights, this is no copy.
        axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        bits = tensor.detach().permute(axes).contiguous().view(-1)
        bits = bits.view(INTEGERS.get(bits.element_size(), torch.int64))
        for chunk in torch.split(bits, CHUNK):
            sums[i] += chunk.sum(dtype=torch.int64)
    return sums


class Replicas(pl.Callback):
    """Stop the run when the replicas of the model are no longer equal.

    The sums of the tensors' bits are gathered before training, after the first batch, every
    ``every_n_steps`` (``None``: never by number), at the end of each epoch, and before a checkpoint
    to go on from.
    Compared are parameters, buffers that training does not change, and statistics of synchronised
    BatchNorm. Other buffers are each process's own until DDP overwrites them with rank 0's.
    """

    def __init__(self, every_n_steps: int | None = 1000) -> None:
        self.every_n_steps = math.inf if every_n_steps is None else every_n_steps
        self.is_comparing = False
        self.reported: set[str] = set()  # buffers that each process writes from its own samples

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare what hooks have written, before DDP overwrites buffers with rank 0's.

        The buffers' sums are kept, to know later which of them training changes.
        """
        self.is_comparing = trainer.world_size > 1 and isinstance(trainer.strategy, DDPStrategy)
        if self.is_comparing:
            buffers = dict(pl_module.named_buffers())
            sums = sums_of_bits([*buffers.values()], pl_module.device).tolist()
            self.first = dict(zip(buffers, sums, strict=True))
            self.compare(trainer, pl_module)
        elif trainer.world_size > 1:
            log.info("Replicas are not compared under %s.", type(trainer.strategy).__name__)
        self.compared_step = -1  # so that the first batch is due

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Compare after the first batch, and when enough steps have passed."""
        every = self.every_n_steps
        if trainer.global_step // every > self.compared_step // every:
            self.compare(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare at the end of an epoch."""
        self.compare(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare what a run would go on from, before it is written; called in every process."""
        if "safe_point" in checkpoint:
            self.compare(trainer, pl_module)

    def compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the replicas; all processes call it.

        Raises:
            TrainingError: in every process, naming the first tensor and the ranks that differ.
        """
        if not self.is_comparing:
            return
        self.compared_step = trainer.global_step
        parameters = [pair for pair in pl_module.named_parameters() if not is_sharded(pair[1])]
        tensors = dict([*parameters, *pl_module.named_buffers()])
        mine = sums_of_bits([*tensors.values()], pl_module.device)
        everyone = trainer.strategy.all_gather(mine)  # (ranks, tensors)
        if (everyone == everyone[0]).all():
            return
        differing = {
            name: [rank for rank, one in enumerate(sums) if one != sums[0]]
            for name, sums in zip(tensors, everyone.T.tolist(), strict=True)
            if len({*sums}) > 1 and not self._is_own_buffer(name, sums, trainer, pl_module)
        }
        if differing:
            first, ranks = next((name, str(ranks)[1:-1]) for name, ranks in differing.items())
            is_sure = getattr(trainer.strategy.model, "find_unused_parameters", False)
            unused = [] if is_sure else without_gradient(pl_module)
            is_by_hand = not (is_sure or pl_module.automatic_optimization)
            text = f"the replicas differ. {first} on rank {ranks} is not that of rank 0"
            text += f" ({len(differing)} tensors differ).\n{SEVERAL * is_by_hand}{CAUSES}"
            text = UNUSED.format(join_first(unused, 3)) if unused else text
            text = f"Step {trainer.global_step}: {text}"
            if trainer.is_global_zero:
                log.error(text)
            raise TrainingError(text)

    def _is_own_buffer(
        self, name: str, sums: list[int], trainer: pl.Trainer, module: pl.LightningModule
    ) -> bool:
        """Return whether each process changes a buffer by its own samples; warn once."""
        owner = module.get_submodule(name.rpartition(".")[0])
        is_synchronised = isinstance(owner, (nn.SyncBatchNorm, SyncBatchNorm))
        # A buffer that is as it was in some process has drifted in the others.
        if name not in self.first or self.first[name] in sums or is_synchronised:
            return False
        if (
            name not in self.reported
            and not isinstance(owner, RUNNING_STATS_NORMS)
            and trainer.is_global_zero
        ):
            log.warning(OWN, name.rpartition(".")[2], type(owner).__name__)
        self.reported.add(name)
        return True


def without_gradient(module: nn.Module) -> list[str]:
    """List trained parameters without a gradient: DDP averages none before it has all."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    return unused if len(unused) < len(trained) else []
