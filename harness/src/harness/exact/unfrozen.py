import logging
from datetime import timedelta
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from harness.errors import TrainingError, UserError
from harness.processes.agreement import gather
from harness.upstream import wrapping

log = logging.getLogger(__name__)

# A process that freezes or unfreezes waits for the others as long to do the same.
PATIENCE_SECONDS = 1500.0  # somewhat less than DDP's own half an hour


class Unfrozen(pl.Callback):
    """Let DDP average the gradients of what is trained, also where training changes what that is.

    Before each step the model is wrapped anew if hooks have frozen or unfrozen parameters, as
    ``BaseFinetuning`` does. With ``find_unused_parameters`` DDP goes without what is frozen by
    itself, and keeps it: a step may unfreeze it again, as those of GANs do.
    """

    def __init__(self) -> None:
        self.known: set[nn.Parameter] = set()  # whose gradients DDP averages
        self.named: dict[str, nn.Parameter] = {}
        self.flags: list[bool] = []  # of these, when they were looked at last
        self.group: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look at what DDP wraps, and before each step."""
        strategy = trainer.strategy
        if stage == "fit" and isinstance(strategy, DDPStrategy):
            call_after = partial(wrapping.call_after, strategy)
            call_after("configure_ddp", lambda: self._learn(pl_module))
            call_after(
                "on_train_batch_start", lambda _, batch_idx: self._follow(trainer, batch_idx)
            )

    def teardown(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Look no more."""
        if isinstance(trainer.strategy, DDPStrategy):
            wrapping.call_no_more(trainer.strategy)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Connect the processes once more, for questions that must not be waited for."""
        if self.known and trainer.world_size > 1:
            patience = timedelta(seconds=PATIENCE_SECONDS)
            self.group = dist.new_group(backend="gloo", timeout=patience)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Refuse a gradient that DDP would leave to each process."""
        if self._flags() == self.flags:
            return
        for name, parameter in self.named.items():
            if parameter.requires_grad and parameter not in self.known:
                raise UserError(
                    f"Step {trainer.global_step}: {name} was unfrozen in the middle of a step, and "
                    "DDP would not average its gradient over the processes.\n"
                    "Unfreeze it before the step: in on_train_batch_start or on_train_epoch_start."
                )

    def _learn(self, pl_module: pl.LightningModule) -> None:
        self.named = dict(pl_module.named_parameters())
        self.known = {p for p in self.named.values() if p.requires_grad}

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.named.values()]

    def _follow(self, trainer: pl.Trainer, batch_idx: int) -> None:
        if batch_idx == 0:  # to look for new ones takes longer than to look at these
            self.named = dict(trainer.lightning_module.named_parameters())
        elif self._flags() == self.flags:
            return
        self.flags = self._flags()
        expected = {p for p in self.named.values() if p.requires_grad}
        strategy: Any = trainer.strategy
        if strategy.model.find_unused_parameters:
            expected |= self.known & {*self.named.values()}
        if expected == self.known or not expected:
            return
        self._check_all_processes(trainer, expected)
        if batch_idx % trainer.accumulate_grad_batches and self.known - expected:
            raise UserError(
                f"Step {trainer.global_step}: parameters were frozen between the batches that are "
                "accumulated for one step, and their gradients would not be averaged.\n"
                "Freeze them where a step begins: "
                "if batch_idx % self.trainer.accumulate_grad_batches == 0"
            )
        wrapping.wrap_anew(strategy, expected)

    def _check_all_processes(self, trainer: pl.Trainer, expected: set[nn.Parameter]) -> None:
        """Refuse what only some processes have frozen or unfrozen.

        Raises:
            TrainingError: names a parameter and the ranks.
        """
        is_told, is_certain = trainer.is_global_zero, True
        changed = [name for name, p in self.named.items() if (p in expected) != (p in self.known)]
        try:
            everyone = [set(names) for names in gather(trainer, changed, self.group)]
        except RuntimeError:  # of gloo: the others train on, and wait in their step
            everyone = [set() for _ in range(trainer.world_size)]
            everyone[trainer.global_rank] = set(changed)
            is_told, is_certain = True, False
        differing = set.union(*everyone) - set.intersection(*everyone)
        if trainer.world_size == 1 or not differing:
            return
        name = min(differing)
        ranks = ", ".join(str(rank) for rank, names in enumerate(everyone) if name in names)
        message = (
            f"Step {trainer.global_step}: {name} was frozen or unfrozen on rank {ranks} alone, so "
            "that the replicas would differ.\nDo it in every process at the same step: not under "
            "`if rank == 0`, nor by what one process has seen."
        )
        if not is_certain:
            message += (
                f"\nOr another process has ended, or came more than {PATIENCE_SECONDS:.0f} s later."
            )
        if is_told:
            log.error(message)
        raise TrainingError(message)
