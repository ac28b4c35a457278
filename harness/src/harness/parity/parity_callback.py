"""The callback that decides when a run checks that its module trains alike on several devices.

In: the trainer, before a step. Out: a warning of each kind of finding, logged once. Next:
``parity_check.py`` computes the check. A run on one device without accumulation imports no check.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.data.loaders import flat_loaders
from harness.distributed.vote import Vote
from harness.errors import UserError
from harness.kinds import BATCH_NORMS
from harness.parity.seeded_steps import DROPOUTS

log = logging.getLogger(__name__)
EVERY_N_STEPS = 16  # how often to look whether the trained parameters or modes have changed
# Later checks may take this fraction of the run's time, or so many seconds if that is more.
MOST_TIME_FRACTION, FREE_SECONDS = 0.02, 1.2


class ParityChecks(pl.Callback):
    """Check a run on several devices, or one that accumulates batches, without changing it.

    Checks run at these times:

    - before the first step, and after steps 1, 2, 4, 8 and so on
    - after each eighth of the run, and at the first step of each epoch
    - after a change of the trained parameters, of BatchNorm's mode, or of dropout
    - with several ranks, before validations 1, 2, 4 and so on

    Each kind of finding is logged once.

    Args:
        is_on: False switches the check off.
    """

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.check: Any = None  # a ParityCheck while the run needs checks, else None
        self.findings: dict[str, str] = {}  # logged warnings, by kind
        self.num_steps = self.num_validations = 0  # of this process, not of the run
        self.modes: list[Any] = []  # ``modes_of`` the module at the last check
        self.has_changed = False
        self.seconds, self.num_checks = 0.0, 0  # time of all checks, and their number

    def begin(self, trainer: pl.Trainer) -> bool:
        """Prepare the checks of a training; return whether it needs any."""
        num_parts = trainer.world_size * trainer.num_devices * int(trainer.accumulate_grad_batches)
        if not self.is_on or num_parts == 1:
            return False
        from harness.parity.collectives import Ranks
        from harness.parity.parity_check import ParityCheck

        self.check, self.vote = ParityCheck(trainer, Ranks(trainer)), Vote(trainer)
        self.started = time.monotonic()
        planned = int(min(trainer.estimated_stepping_batches, 2**62))
        self.every = max(1, planned // 8)  # steps; finds changes late in a long epoch
        return True

    def before_batch(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Run a parity check before this step if one is due.

        The run calls this method after all other hooks of the batch.
        """
        if self.check is not None and batch_idx % int(trainer.accumulate_grad_batches) == 0:
            self._before_step(trainer, module, batch_idx)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop checking."""
        self.check = None

    on_exception = on_train_end

    def _before_step(self, trainer: pl.Trainer, module: pl.LightningModule, batch_idx: int) -> None:
        number, self.num_steps = self.num_steps, self.num_steps + 1
        if number % EVERY_N_STEPS == 0 or batch_idx == 0:
            self.has_changed |= self.modes != [*modes_of(module)]
        is_scheduled = number & (number - 1) == 0 or batch_idx == 0 or number % self.every == 0
        votes = self.vote.ask(int(self.has_changed and not is_scheduled))
        is_changed = bool(votes and votes[0])
        if (
            not (is_scheduled or is_changed)
            or getattr(trainer.strategy.model, "static_graph", 0) > number
        ):
            return
        if number < 2 or is_changed or self._has_time():
            self.modes, self.has_changed = [*modes_of(module)], False
            self._run(trainer, lambda: self.check.check_step(max(0, number - 1), batch_idx))
            rewrap = getattr(trainer.strategy, "rewrap", None)
            if rewrap and getattr(trainer.strategy.model, "find_unused_parameters", False):
                rewrap()  # DDP has noted which parameters the check has used

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Check that all ranks log the same values for the first samples of each loader."""
        is_first = batch_idx == dataloader_idx == 0 and not trainer.sanity_checking
        if self.check is None or not is_first or self.check.ranks.size == 1:
            return
        number, self.num_validations = self.num_validations, self.num_validations + 1
        if number & (number - 1) == 0 and self._has_time():
            for i, loader in enumerate(flat_loaders(trainer.val_dataloaders)):
                if self.check is not None:
                    self._run(trainer, partial(self.check.check_validation, loader, i))

    def _has_time(self) -> bool:
        """Return, on all ranks, whether rank 0 has time left for another check."""
        max_seconds = max(FREE_SECONDS, MOST_TIME_FRACTION * (time.monotonic() - self.started))
        has_time: bool = self.check.ranks.all_values(self.seconds < max_seconds)[0]
        return has_time

    def _run(self, trainer: pl.Trainer, check: Callable[[], dict[str, str]]) -> None:
        """Run a check, log its new findings, and count its time."""
        started = time.monotonic()
        try:
            synchronise_buffers(trainer.strategy.model)
            found = check()
        except UserError:
            raise
        except Exception as error:  # a bug of the check, or a rank that does not answer
            log.debug("The parity check has failed", exc_info=True)
            found = {
                "unchecked": f"The parity check has failed, and is now off: {error}\n"
                "The training continues."
            }
            self.check = None
        self.seconds += time.monotonic() - started
        self.num_checks += 1
        for kind, message in found.items():
            is_late = kind == "unchecked" and self.num_steps > 1  # the first check gave the reason
            if kind not in self.findings and trainer.is_global_zero and not is_late:
                log.warning("%s", message)
        self.findings = {**found, **self.findings}
        if "different" in self.findings:
            self.check = None  # further checks would find the same difference


def modes_of(module: nn.Module) -> Any:
    """Yield each ``requires_grad``, and each mode and ``p`` of BatchNorm and dropout layers."""
    yield from (parameter.requires_grad for parameter in module.parameters())
    for layer in module.modules():
        if isinstance(layer, (*BATCH_NORMS, *DROPOUTS)):
            yield layer.training, getattr(layer, "p", None)


def synchronise_buffers(model: Any) -> None:
    """Broadcast the buffers of rank 0, as DDP's next forward does."""
    is_wrapped = isinstance(model, DistributedDataParallel)
    for buffer in model.modules_buffers if is_wrapped and model.broadcast_buffers else ():
        dist.broadcast(buffer, 0)
