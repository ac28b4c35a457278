"""Look whether anything logs the scores that checkpoints and early stopping go by."""

import logging
import os
import re
from collections.abc import Iterable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint

from harness.errors import UserError
from harness.suggestions import suggest

log = logging.getLogger(__name__)

DEFAULT = "val/loss"  # of conf/train.yaml
MISSING = re.compile(r"monitor='(.+?)'.* could not find the monitored key.*: \[(.*)\]")


class Objective(pl.Callback):
    """Look for the scores of checkpoints and early stopping where these first look.

    Where nothing logs the default score, or nothing is validated, best.ckpt is the newest
    checkpoint, which is said. Any other score that is missing stops the run, by Lightning, and so
    does one of early stopping.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let a module's own ``ModelCheckpoint`` write where the config's would."""
        self.has_looked = False
        self.monitors: dict[Any, str] = {}  # of callbacks that keep the newest checkpoint instead
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = os.path.join(trainer.default_root_dir, "checkpoints")

    def on_values(self, trainer: pl.Trainer, stage: str, *_: Any) -> None:
        """Look before Lightning's callbacks do, where a validation or an epoch ends."""
        if stage == ("train_epoch" if acts_at_epoch_end(trainer) else "validate"):
            self.look(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep states under the names that a resumed run asks for: the monitor is part of them."""
        for callback, monitor in self.monitors.items():
            state = checkpoint["callbacks"].pop(callback.state_key)
            callback.monitor = monitor
            checkpoint["callbacks"][callback.state_key] = state
            callback.monitor = None

    def look(self, trainer: pl.Trainer) -> None:
        """Warn of a checkpoint's score that is missing; raise a UserError for early stopping's."""
        logged = trainer.callback_metrics
        if self.has_looked:
            return
        self.has_looked = True
        for stopper in trainer.early_stopping_callbacks:
            if stopper.strict and stopper.monitor not in logged:
                raise UserError(
                    f"Early stopping: {nobody_logs('monitor', stopper.monitor, logged)}"
                )
        for callback in trainer.checkpoint_callbacks:
            monitor = getattr(callback, "monitor", None)
            # Of a chosen one Lightning raises, after the module's last hook: see missing_score.
            is_chosen = monitor != DEFAULT and trainer.enable_validation
            if monitor is not None and monitor not in logged and not is_chosen:
                self.monitors[callback], callback.monitor = monitor, None  # type: ignore[attr-defined]
                if trainer.is_global_zero:
                    text = nobody_logs("objective", monitor, logged)
                    log.warning("best.ckpt is the newest checkpoint: %s", text)


def acts_at_epoch_end(trainer: pl.Trainer) -> bool:
    """Return whether Lightning's callbacks read scores when an epoch ends, not a validation."""
    is_once = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    return is_once or not trainer.enable_validation


def nobody_logs(key: str, monitor: str, metrics: Iterable[str]) -> str:
    """Say that nothing logs a score, what is logged, and what to type."""
    # A step's value, a rate or a counter is nothing that a checkpoint could be the best of.
    logged = [name for name in metrics if not re.search("^lr-|_step$|^epoch$|^step$", name)]
    hint = suggest(monitor, logged, f"{key}=") or f" Choose one with {key}=<name>."
    return f"nothing logs {key}={monitor}, but {', '.join(logged) or 'nothing'}.{hint}"


def missing_score(message: str) -> str | None:
    """Return what to say where Lightning's message is that nothing logs a checkpoint's score."""
    found = MISSING.search(message)
    names = re.findall(r"'([^']+)'", found[2]) if found else []
    return nobody_logs("objective", found[1], names).replace("n", "N", 1) if found else None
