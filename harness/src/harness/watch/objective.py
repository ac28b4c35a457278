"""Look whether anything logs the scores that checkpoints and early stopping go by."""

import difflib
import logging
import os
import re
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from harness.errors import UserError

log = logging.getLogger(__name__)

DEFAULT = "val/loss"  # of conf/train.yaml
COUNTERS = ("epoch", "step")  # which Lightning adds to what is logged


class Objective(pl.Callback):
    """Look for each monitored score at the end of the first epoch, or of its validation.

    Where nothing logs the default score, or nothing is validated, best.ckpt is the newest
    checkpoint, which is said. Any other score that is missing stops the run, by Lightning, and so
    does one of early stopping.
    """

    def __init__(self) -> None:
        self.has_looked = False
        self.monitors: dict[Any, str] = {}  # of callbacks that keep the newest checkpoint instead

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let a module's own ``ModelCheckpoint`` write where the config's would."""
        self.has_looked = False
        for callback in callbacks_of(trainer):
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = os.path.join(trainer.default_root_dir, "checkpoints")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look before a checkpoint is written after a validation within an epoch."""
        if not trainer.sanity_checking and not saves_at_epoch_end(trainer):
            self.look(trainer, pl_module, at_epoch_end=False)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look before a checkpoint is written at the end of an epoch."""
        if saves_at_epoch_end(trainer):
            self.look(trainer, pl_module, at_epoch_end=True)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep states under the names that a resumed run asks for: the monitor is part of them."""
        for callback, monitor in self.monitors.items():
            state = checkpoint["callbacks"].pop(callback.state_key)
            callback.monitor = monitor
            checkpoint["callbacks"][callback.state_key] = state
            callback.monitor = None

    def look(self, trainer: pl.Trainer, pl_module: pl.LightningModule, at_epoch_end: bool) -> None:
        """Report each score that is missing, once.

        Raises:
            UserError: if a score of early stopping is missing.
        """
        if self.has_looked:
            return
        self.has_looked = True
        metrics = list(trainer.callback_metrics)
        # A step's value, or a rate, is nothing that a checkpoint could be the best of.
        logged = [name for name in metrics if name[:3] != "lr-" and name[-5:] != "_step"]
        what = f"{type(pl_module).__name__} logs {', '.join(logged) or 'nothing'}"
        if not trainer.enable_validation:
            what = f"nothing is validated, and {what}"
        for callback in callbacks_of(trainer):
            monitor = getattr(callback, "monitor", None)
            if not isinstance(monitor, str) or monitor in metrics:
                continue
            if monitor.startswith("train") and not at_epoch_end:
                continue  # it may come at the end of the epoch
            if isinstance(callback, EarlyStopping):
                raise UserError(f"Early stopping watches {monitor}, but {what}.")
            if isinstance(callback, ModelCheckpoint):
                if monitor != DEFAULT and trainer.enable_validation:
                    continue  # Lightning raises, after the module's last hook: see missing_score
                self.monitors[callback], callback.monitor = monitor, None
                if trainer.is_global_zero:
                    text = "best.ckpt is the newest checkpoint: nothing logs objective=%s (%s). %s"
                    log.warning(text, monitor, what, suggestion(monitor, logged))


def missing_score(message: str) -> str | None:
    """Say what to type where Lightning's message is that nothing logs a checkpoint's score."""
    found = re.search(r"monitor='(.+?)'.* could not find the monitored key.*: \[(.*)\]", message)
    if found is None:
        return None
    logged = [name for name in re.findall(r"'([^']+)'", found[2]) if name not in COUNTERS]
    close = difflib.get_close_matches(found[1], logged, n=1, cutoff=0.5)
    hint = f"Did you mean objective={close[0]}?" if close else "Choose one with objective=<name>."
    return f"Nothing logs objective={found[1]}, but {', '.join(logged)}.\n{hint}"


def suggestion(monitor: str, logged: list[str]) -> str:
    """What to type as ``objective=``."""
    if not logged:
        return "Log a score to choose it with objective=."
    close = difflib.get_close_matches(monitor, logged, n=1, cutoff=0.5)
    word = f"Did you mean objective={close[0]}" if close else "Choose one with objective=<name>"
    return f"{word} mode=min (or mode=max){'?' if close else '.'}"


def callbacks_of(trainer: pl.Trainer) -> list[Any]:
    """The callbacks of a Trainer, which sets them without a type."""
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]


def saves_at_epoch_end(trainer: pl.Trainer) -> bool:
    """Whether a checkpoint is written when an epoch ends, and not after a validation in it."""
    is_once = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    return is_once or not trainer.enable_validation
