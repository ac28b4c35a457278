"""When a run checks its first batches: before training, in the second epoch, and after thawing."""

import contextlib
import logging
from typing import Any

import pytorch_lightning as pl

from harness.exact.first_batch_check import check_first_batch
from harness.exact.simulated import copy_of
from harness.exact.stand_ins import nothing
from harness.shards import has_parts

log = logging.getLogger(__name__)
MOST_PARAMETERS = 100_000_000  # which fsdp copies for the check, on the first host's CPU
EVERY_N_BATCHES = 16  # it is looked whether parameters have been frozen or thawed


class FirstBatchCheck(pl.Callback):
    """Check the first batches of a run on several devices, or of one that accumulates.

    The first process computes; the others wait in their next collective operation.
    """

    def __init__(self) -> None:
        self.told: set[str] = set()
        self.whole: pl.LightningModule | None = None
        self.flags: list[bool] = []
        self.has_checked_again = False
        self.called: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy a module whose parameters will have parts, as long as they are whole."""
        is_parted = getattr(trainer.strategy, "strategy_name", "") == "fsdp"
        if stage == "fit" and is_parted and trainer.is_global_zero:
            num = sum(parameter.numel() for parameter in pl_module.parameters())
            with contextlib.suppress(Exception):  # of what cannot be copied
                self.whole = copy_of(pl_module) if num <= MOST_PARAMETERS else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at each step, after all hooks."""
        strategy: Any = trainer.strategy
        original = strategy.on_train_batch_start

        def called(batch: Any, batch_idx: int) -> None:
            original(batch, batch_idx)
            self.look(trainer, pl_module, batch_idx)

        devices = trainer.world_size * trainer.num_devices
        if devices * int(trainer.accumulate_grad_batches) > 1 and trainer.is_global_zero:
            self.before = vars(strategy).get("on_train_batch_start")
            vars(strategy)["on_train_batch_start"] = self.called = called

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Look no more."""
        own: Any = vars(trainer.strategy)
        if own.get("on_train_batch_start", 0) is self.called:
            own.pop("on_train_batch_start")
            own |= {"on_train_batch_start": self.before} if self.before else {}

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        """See ``on_train_end``."""
        self.on_train_end(trainer)

    def look(self, trainer: pl.Trainer, module: pl.LightningModule, batch_idx: int) -> None:
        """Check, if something may have changed."""
        if batch_idx % EVERY_N_BATCHES:
            return
        flags = [parameter.requires_grad for parameter in module.parameters()]
        is_second = bool(self.flags) and batch_idx == 0 and not self.has_checked_again
        if flags == self.flags and not is_second:
            return
        is_first, self.flags, self.has_checked_again = not self.flags, flags, is_second
        if any(map(has_parts, module.parameters())):
            if not is_first:
                return
            module = self._whole_one(trainer, module, flags)
        is_split = trainer.world_size * int(trainer.accumulate_grad_batches) > 1
        split_calls = getattr(trainer.strategy, "split_calls", nothing)
        loaders = trainer.train_dataloader
        for found in check_first_batch(module, loaders, 1 + is_split, split_calls):
            if found.kind in self.told or (found.kind == "unchecked" and not is_first):
                continue
            self.told.add(found.kind)
            log.warning("%s", found.sentence)

    def _whole_one(
        self, trainer: pl.Trainer, module: pl.LightningModule, flags: list[bool]
    ) -> pl.LightningModule:
        """The copy of a module whose parameters have parts; that itself, where there is none."""
        if self.whole is None:
            return module
        whole, self.whole = self.whole, None
        whole.trainer = trainer
        for parameter, flag in zip(whole.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)
        trainer.precision_plugin.convert_module(whole)
        return whole
