"""Compare the replicas of the model between the ranks of a run."""

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
    "the loss does not depend on some parameters, so DDP has not averaged all gradients: {}.\n"
    "Use these parameters or freeze them. If some steps leave them out, as with the two networks "
    "of a GAN, set trainer.strategy.find_unused_parameters=true."
)
CAUSES = (
    "Some code changes the model on one rank only: code under `if rank == 0`, a parameter that "
    "DDP does not know, or a value that is computed from one rank's data."
)
SEVERAL = (
    "If training_step calls manual_backward for one of several networks, as with a GAN, set "
    "trainer.strategy.find_unused_parameters=true. Otherwise: "
)
OWN = (
    "Buffer %s of %s is written by each process from its own samples, and only rank 0's values "
    "are kept.\nGather the samples first: x = self.all_gather(x).flatten(0, -2)."
)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by the bytes of an element
CHUNK = 2**22  # elements per sum: 32 MiB as int64


def sums_of_bits(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a checksum of each tensor, the sum of its elements' bits as integers.

    To sum in int64, torch copies the elements to int64. Chunks keep this copy small: for a whole
    float32 tensor, it would need twice the tensor's memory.

    Returns:
        Shape (len(tensors),), on ``device``.
    """
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for i, tensor in enumerate(tensors):
        # With the axes in memory order, contiguous() copies nothing, also for channels_last.
        axes = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        bits = tensor.detach().permute(axes).contiguous().view(-1)
        bits = bits.view(INTEGERS.get(bits.element_size(), torch.int64))
        for chunk in torch.split(bits, CHUNK):
            sums[i] += chunk.sum(dtype=torch.int64)
    return sums


class Replicas(pl.Callback):
    """Stop the run when the replicas of the model are no longer bit-identical.

    The ranks compare checksums of their tensors before training, after the first batch, every
    ``every_n_steps`` steps, at the end of each epoch, and before a checkpoint to resume from. With
    ``every_n_steps=None`` there is no comparison by number of steps.

    The checksums cover parameters, buffers that training does not change, and statistics of
    synchronised BatchNorm. Other buffers differ by rank until DDP overwrites them with rank 0's.
    """

    def __init__(self, every_n_steps: int | None = 1000) -> None:
        self.every_n_steps = math.inf if every_n_steps is None else every_n_steps
        self.is_comparing = False
        self.reported: set[str] = set()  # buffers that each process writes from its own samples

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare before DDP overwrites buffers with rank 0's, because hooks may have changed them.

        The checksums of the buffers are stored, to know later which buffers training changes.
        """
        self.is_comparing = trainer.world_size > 1 and isinstance(trainer.strategy, DDPStrategy)
        if self.is_comparing:
            buffers = dict(pl_module.named_buffers())
            sums = sums_of_bits([*buffers.values()], pl_module.device).tolist()
            self.first_sums = dict(zip(buffers, sums, strict=True))
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
        """Compare before a checkpoint to resume from is written; every rank calls this hook."""
        if "safe_point" in checkpoint:
            self.compare(trainer, pl_module)

    def compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the replicas; every rank must call this method.

        Raises:
            TrainingError: on every rank; names the first tensor and the ranks that differ.
        """
        if not self.is_comparing:
            return
        self.compared_step = trainer.global_step
        parameters = [pair for pair in pl_module.named_parameters() if not is_sharded(pair[1])]
        tensors = dict([*parameters, *pl_module.named_buffers()])
        own_sums = sums_of_bits([*tensors.values()], pl_module.device)
        all_sums = trainer.strategy.all_gather(own_sums)  # (ranks, tensors)
        if (all_sums == all_sums[0]).all():  # synchronises
            return
        differing = {
            name: [rank for rank, rank_sum in enumerate(sums) if rank_sum != sums[0]]
            for name, sums in zip(tensors, all_sums.T.tolist(), strict=True)
            if len({*sums}) > 1 and not self._is_own_buffer(name, sums, trainer, pl_module)
        }
        if differing:
            first, ranks = next((name, str(ranks)[1:-1]) for name, ranks in differing.items())
            finds_unused = getattr(trainer.strategy.model, "find_unused_parameters", False)
            unused = [] if finds_unused else without_gradient(pl_module)
            is_manual = not (finds_unused or pl_module.automatic_optimization)
            text = f"the replicas differ. {first} on rank {ranks} differs from that of rank 0"
            text += f" ({len(differing)} tensors differ).\n{SEVERAL * is_manual}{CAUSES}"
            text = UNUSED.format(join_first(unused, 3)) if unused else text
            text = f"Step {trainer.global_step}: {text}"
            if trainer.is_global_zero:
                log.error(text)
            raise TrainingError(text)

    def _is_own_buffer(
        self, name: str, sums: list[int], trainer: pl.Trainer, module: pl.LightningModule
    ) -> bool:
        """Return whether each rank changes a buffer by its own samples; warn once per buffer."""
        layer = module.get_submodule(name.rpartition(".")[0])
        is_synchronised = isinstance(layer, (nn.SyncBatchNorm, SyncBatchNorm))
        # If training has left the buffer unchanged on some rank, its change on others is a fault.
        if name not in self.first_sums or self.first_sums[name] in sums or is_synchronised:
            return False
        if (
            name not in self.reported
            and not isinstance(layer, RUNNING_STATS_NORMS)
            and trainer.is_global_zero
        ):
            log.warning(OWN, name.rpartition(".")[2], type(layer).__name__)
        self.reported.add(name)
        return True


def without_gradient(module: nn.Module) -> list[str]:
    """List trained parameters without a gradient. DDP averages only once all gradients are there.

    The list is empty if no parameter has a gradient.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    return unused if len(unused) < len(trained) else []
