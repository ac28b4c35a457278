"""The callback that decides when a run checks whether its module trains alike on several devices.

In: the run's trainer, before a step. Out: one warning of each kind. Next: ``parity_check.py``
computes with the run's own ranks; a run of one device that does not accumulate never imports it.
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

from harness.data.loaders import leaves
from harness.errors import UserError
from harness.exact.seeded_steps import DROPOUTS
from harness.kinds import BATCH_NORMS
from harness.processes.agreement import Agreement

log = logging.getLogger(__name__)
EVERY_N_STEPS = 16  # how often to look whether other parts are trained than at the last check
# Checks after the first two take at most this part of the time, or so many seconds.
MOST_OF_TIME, FREE_SECONDS = 0.02, 1.2


class ParityChecks(pl.Callback):
    """Check a run on several devices, or one that accumulates, and leave no trace in it.

    It checks before the first step, after steps 1, 2, 4, 8 and so on, after each eighth of the run,
    at the first step of each epoch, and after a change of what is trained, of BatchNorm's mode or
    of dropout; and with several ranks before validations 1, 2, 4 and so on. A finding is logged
    once.

    Args:
        is_on: False never checks.
    """

    def __init__(self, is_on: bool = True) -> None:
        self.is_on = is_on
        self.check: Any = None  # a ParityCheck, while a run of several parts trains
        self.findings: dict[str, str] = {}  # that were logged, by kind
        self.num_steps = self.num_validations = 0  # of this process
        self.mode: list[Any] = []  # of the module's parts at the last check
        self.has_changed = False
        self.seconds, self.num_looks = 0.0, 0  # what checks have taken, and how many there were

    def begin(self, trainer: pl.Trainer) -> bool:
        """Prepare the checks of a training, and return whether it needs any."""
        num_parts = trainer.world_size * trainer.num_devices * int(trainer.accumulate_grad_batches)
        if not self.is_on or num_parts == 1:
            return False
        from harness.exact.collectives import Ranks
        from harness.exact.parity_check import ParityCheck

        self.check, self.agreement = ParityCheck(trainer, Ranks(trainer)), Agreement(trainer)
        self.started = time.monotonic()
        planned = int(min(trainer.estimated_stepping_batches, 2**62))
        self.every = max(1, planned // 8)  # for what begins late, within a long epoch
        return True

    def before_batch(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Check before a step if it is due, after all hooks of callbacks and module."""
        if self.check is not None and batch_idx % int(trainer.accumulate_grad_batches) == 0:
            self._before_step(trainer, module, batch_idx)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Check no more."""
        self.check = None

    on_exception = on_train_end

    def _before_step(self, trainer: pl.Trainer, module: pl.LightningModule, batch_idx: int) -> None:
        number, self.num_steps = self.num_steps, self.num_steps + 1
        if number % EVERY_N_STEPS == 0 or batch_idx == 0:
            self.has_changed |= self.mode != [*modes(module)]
        is_scheduled = number & (number - 1) == 0 or batch_idx == 0 or number % self.every == 0
        votes = self.agreement.ask(int(self.has_changed and not is_scheduled))
        is_changed = bool(votes and votes[0])
        if (
            not (is_scheduled or is_changed)
            or getattr(trainer.strategy.model, "static_graph", 0) > number
        ):
            return
        if number < 2 or is_changed or self._has_time():
            self.mode, self.has_changed = [*modes(module)], False
            self._run(trainer, lambda: self.check.look(max(0, number - 1), batch_idx))
            wrap_anew = getattr(trainer.strategy, "wrap_anew", None)
            if wrap_anew and getattr(trainer.strategy.model, "find_unused_parameters", False):
                wrap_anew()  # DDP has noted which parameters the check has used

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Check whether the ranks evaluate the same samples alike."""
        is_first = batch_idx == dataloader_idx == 0 and not trainer.sanity_checking
        if self.check is None or not is_first or self.check.ranks.size == 1:
            return
        number, self.num_validations = self.num_validations, self.num_validations + 1
        if number & (number - 1) == 0 and self._has_time():
            for i, loader in enumerate(leaves(trainer.val_dataloaders)):
                if self.check is not None:
                    self._run(trainer, partial(self.check.look_at_validation, loader, i))

    def _has_time(self) -> bool:
        """Return whether rank 0 has time for another check."""
        most = max(FREE_SECONDS, MOST_OF_TIME * (time.monotonic() - self.started))
        has_time: bool = self.check.ranks.all_values(self.seconds < most)[0]
        return has_time

    def _run(self, trainer: pl.Trainer, look: Callable[[], dict[str, str]]) -> None:
        started = time.monotonic()
        try:
            synchronise_buffers(trainer.strategy.model)
            found = look()
        except UserError:
            raise
        except Exception as error:  # of the check itself, or of a rank that does not answer
            log.debug("The parity check has failed", exc_info=True)
            found = {"unchecked": f"The check of a few samples has failed, and is off: {error}"}
            self.check = None
        self.seconds += time.monotonic() - started
        self.num_looks += 1
        for kind, sentence in found.items():
            is_late = kind == "unchecked" and self.num_steps > 1  # the first one tells why
            if kind not in self.findings and trainer.is_global_zero and not is_late:
                log.warning("%s", sentence)
        self.findings = {**found, **self.findings}
        if "different" in self.findings:
            self.check = None  # it has done its work


def modes(module: nn.Module) -> Any:
    """Iterate over what is trained, BatchNorm's modes, and how much is dropped."""
    yield from (parameter.requires_grad for parameter in module.parameters())
    for part in module.modules():
        if isinstance(part, (*BATCH_NORMS, *DROPOUTS)):
            yield part.training, getattr(part, "p", None)


def synchronise_buffers(model: Any) -> None:
    """Give all ranks the buffers of rank 0, as DDP's next forward does."""
    is_wrapped = isinstance(model, DistributedDataParallel)
    for buffer in model.modules_buffers if is_wrapped and model.broadcast_buffers else ():
        dist.broadcast(buffer, 0)
