"""Check that something logs the values that checkpoints and early stopping monitor."""

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


class MonitorCheck(pl.Callback):
    """Check the monitored values just before the checkpoint callbacks first read them.

    - If nothing logs the default objective, or nothing is validated, the run logs a warning and
      best.ckpt is the newest checkpoint.
    - If nothing logs an objective that the user chose, Lightning stops the run.
    - If nothing logs the value that early stopping monitors, this callback stops the run.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give a module's own ``ModelCheckpoint`` the folder of the config's checkpoints."""
        self.has_checked = False
        # By callback that keeps the newest checkpoint instead: the monitor that was removed.
        self.monitors: dict[Any, str] = {}
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = os.path.join(trainer.default_root_dir, "checkpoints")

    def on_values(self, trainer: pl.Trainer, stage: str, *_: Any) -> None:
        """Check once, before Lightning's callbacks read the values of a validation or an epoch."""
        if stage == ("train_epoch" if acts_at_epoch_end(trainer) else "validate"):
            self.check_monitors(trainer)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save states under the original keys, which contain the monitor, for a resumed run."""
        for callback, monitor in self.monitors.items():
            state = checkpoint["callbacks"].pop(callback.state_key)
            callback.monitor = monitor
            checkpoint["callbacks"][callback.state_key] = state
            callback.monitor = None

    def check_monitors(self, trainer: pl.Trainer) -> None:
        """Warn if nothing logs a checkpoint's objective.

        Raises:
            UserError: if nothing logs the value that early stopping monitors.
        """
        logged = trainer.callback_metrics
        if self.has_checked:
            return
        self.has_checked = True
        for stopper in trainer.early_stopping_callbacks:
            if stopper.strict and stopper.monitor not in logged:
                objectives = [getattr(c, "monitor", None) for c in trainer.checkpoint_callbacks]
                is_objective = stopper.monitor in objectives
                key = "objective" if is_objective else "callbacks.<name>.monitor"
                text = describe_missing(key, stopper.monitor, logged)
                raise UserError(f"Early stopping: {text}")
        for callback in trainer.checkpoint_callbacks:
            monitor = getattr(callback, "monitor", None)
            # If the user chose the objective, Lightning raises after the module's last hook, which
            # may still log it: see missing_objective.
            is_chosen = monitor != DEFAULT and trainer.enable_validation
            if monitor is not None and monitor not in logged and not is_chosen:
                self.monitors[callback], callback.monitor = monitor, None  # type: ignore[attr-defined]
                if trainer.is_global_zero:
                    text = describe_missing("objective", monitor, logged)
                    log.warning("best.ckpt is the newest checkpoint: %s", text)


def acts_at_epoch_end(trainer: pl.Trainer) -> bool:
    """Return whether Lightning's callbacks read values after an epoch, not after a validation."""
    is_once = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    return is_once or not trainer.enable_validation


def describe_missing(key: str, monitor: str, metrics: Iterable[str]) -> str:
    """Return a message that nothing logs the monitored value, with a logged value to choose."""
    # A step's value, a learning rate or a counter is no objective.
    logged = [name for name in metrics if not re.search("^lr-|_step$|^epoch$|^step$", name)]
    hint = suggest(monitor, logged, f"{key}=") or f" Choose one with {key}=<name>."
    return f"nothing logs {key}={monitor}. Logged are: {', '.join(logged) or 'no metrics'}.{hint}"


def missing_objective(message: str) -> str | None:
    """Translate Lightning's message that nothing logs a checkpoint's objective; else ``None``."""
    found = MISSING.search(message)
    names = re.findall(r"'([^']+)'", found[2]) if found else []
    return describe_missing("objective", found[1], names).replace("n", "N", 1) if found else None
