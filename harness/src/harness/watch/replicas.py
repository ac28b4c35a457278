"""Compare the replicas of the model that the processes of a run hold."""

import logging
import math
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import nn

from harness.errors import TrainingError
from harness.names import few
from harness.shards import has_parts
from harness.strategies.sync_batch_norm import NORMS, SyncBatchNorm
from harness.watch.hashing import hashes

log = logging.getLogger(__name__)


class Replicas(pl.Callback):
    """Stop the run when the replicas of the model are no longer equal by bit.

    Every process hashes each tensor, and the hashes are gathered: 8 bytes per tensor. They are
    compared after the first batch, every ``every_n_steps``, at the end of each epoch, and before a
    checkpoint to go on from. Compared are parameters, buffers that training does not change, and
    BatchNorm's statistics where they are computed over all processes. Other buffers that differ
    are each process's own until DDP overwrites them with rank 0's; a line names those of no norm.

    Args:
        every_n_steps: ``None`` leaves out the comparison by number.
    """

    def __init__(self, every_n_steps: int | None = 1000) -> None:
        self.every_n_steps = math.inf if every_n_steps is None else every_n_steps
        self.is_comparing = False
        self.reported: set[str] = set()  # buffers that each process writes from its own samples

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hash the buffers, to know later which of them training changes."""
        self.is_comparing = trainer.world_size > 1 and isinstance(trainer.strategy, DDPStrategy)
        self.compared_step, self.is_first_batch = trainer.global_step, True
        if self.is_comparing:
            self.first = hashes(list(pl_module.buffers()), pl_module.device)
        elif trainer.world_size > 1:
            log.info("Replicas are not compared under %s.", type(trainer.strategy).__name__)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Compare after the first batch, and when enough steps have passed."""
        every = self.every_n_steps
        is_due = trainer.global_step // every > self.compared_step // every
        if self.is_comparing and (is_due or self.is_first_batch):
            self.is_first_batch = False
            self.compare(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare at the end of an epoch."""
        if self.is_comparing:
            self.compare(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Compare what a run would go on from, before it is written; called in every process."""
        if self.is_comparing and "safe_point" in checkpoint:
            self.compare(trainer, pl_module)

    def compare(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the replicas; all processes call it.

        Raises:
            TrainingError: in every process, naming the first tensor and the ranks that differ.
        """
        self.compared_step = trainer.global_step
        parameters = [pair for pair in pl_module.named_parameters() if not has_parts(pair[1])]
        named = [*parameters, *pl_module.named_buffers()]
        mine = hashes([tensor for _, tensor in named], pl_module.device)
        everyone = trainer.strategy.all_gather(mine)  # (ranks, tensors)
        differs = (everyone != everyone[0]).cpu()
        if not differs.any():
            return
        num = len(parameters)
        # Training changes a buffer in every process; one that is as it was in some has drifted.
        has_drifted = (everyone[:, num:] == self.first).any(dim=0).cpu()
        synchronised = synchronised_buffers(pl_module)
        is_synchronised = torch.tensor([name in synchronised for name, _ in named[num:]])
        may_differ = torch.zeros(len(named), dtype=torch.bool)
        may_differ[num:] = ~(has_drifted | is_synchronised.bool())
        self._report_buffers(
            trainer, pl_module, [named[i][0] for i in (differs.any(0) & may_differ).nonzero()]
        )
        differs &= ~may_differ
        if differs.any():
            names = [named[i][0] for i in differs.any(dim=0).nonzero()]
            ranks = differs[:, differs.any(dim=0)][:, 0].nonzero().flatten().tolist()
            message = explanation(trainer, pl_module, names, ranks)
            if trainer.is_global_zero:
                log.error(message)
            raise TrainingError(message)

    def _report_buffers(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, names: list[str]
    ) -> None:
        """Warn once of each buffer that holds what one process has seen, norms left out."""
        for name in names:
            path, _, attribute = name.rpartition(".")
            owner = pl_module.get_submodule(path)
            if isinstance(owner, NORMS) or name in self.reported:
                continue
            self.reported.add(name)
            if trainer.is_global_zero:
                log.warning(
                    "Buffer %s of %s is written by each process from its own samples; process 0's "
                    "is kept: not what one process would have. Gather what is written first, as "
                    "in x = self.all_gather(x).flatten(0, -2).",
                    *(attribute, type(owner).__name__),
                )


def explanation(
    trainer: pl.Trainer, module: pl.LightningModule, names: list[str], ranks: list[int]
) -> str:
    """Name the first tensor that differs, or parameters without a gradient, which is a cause.

    DDP averages no gradients at all before it has those of all parameters.
    """
    step = trainer.global_step
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    unused = [name for name, parameter in trained.items() if parameter.grad is None]
    model = getattr(trainer.strategy, "model", None)
    finds_unused = getattr(model, "find_unused_parameters", False)
    if unused and len(unused) < len(trained) and not finds_unused:
        return (
            f"Step {step}: these parameters have no part in the loss, and DDP has not averaged "
            f"all gradients: {few(unused, 3)}.\nUse or freeze them, or, as for both networks of a "
            "GAN, set trainer.strategy.find_unused_parameters=true."
        )
    more = f" ({len(names) - 1} more tensors differ)" if len(names) > 1 else ""
    return (
        f"Step {step}: the replicas differ. {names[0]} on rank {', '.join(map(str, ranks))} is not "
        f"that of rank 0{more}.\nSomething changes the model in one process alone, such as code "
        "under `if rank == 0`, a parameter that DDP does not know, or what is computed from one "
        "process's data."
    )


def synchronised_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers that are computed over all processes."""
    return {
        f"{name}.{key}"
        for name, child in module.named_modules()
        if isinstance(child, (nn.SyncBatchNorm, SyncBatchNorm))
        for key, _ in child.named_buffers(recurse=False)
    }
