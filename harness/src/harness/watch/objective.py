import difflib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.utilities.model_helpers import is_overridden

from harness.errors import UserError

log = logging.getLogger(__name__)

DEFAULT = "val/loss"  # of conf/train.yaml


class Objective(pl.Callback):
    """Say which monitored score nothing logs, at the end of the first epoch instead of never.

    Without a score that nobody has chosen, and where nothing is validated, best.ckpt is the newest
    checkpoint. A chosen score that is missing stops the run, and so does one of early stopping.

    Args:
        chosen: the score that a command or a YAML file has chosen; ``None`` is the default.
    """

    def __init__(self, chosen: str | None = None) -> None:
        self.chosen = chosen
        self.has_looked = False
        self.refusal: str | None = None
        self.watched: dict[Any, str] = {}  # what those that keep the newest were to monitor

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let a module's own ``ModelCheckpoint`` write where the config's would, which it replaces.

        Called before it chooses a folder beside the logs.
        """
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
        for callback in callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = os.path.join(trainer.default_root_dir, "checkpoints")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin anew."""
        self.has_looked = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look where checkpoints are written after a validation; called before that."""
        if not trainer.sanity_checking and not saves_at_epoch_end(trainer):
            self.look(trainer, pl_module, tells_training=False)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look where they are written at the end of an epoch, when all of it is logged."""
        if saves_at_epoch_end(trainer):
            self.look(trainer, pl_module, tells_training=True)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep states by the names that a run which goes on asks for: the monitor is part of it."""
        for callback, monitor in self.watched.items():
            state = checkpoint["callbacks"].pop(callback.state_key)
            callback.monitor = monitor
            checkpoint["callbacks"][callback.state_key] = state
            callback.monitor = None

    def look(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, tells_training: bool
    ) -> None:
        """Tell of each score that is missing.

        Args:
            trainer: with the callbacks that monitor.
            pl_module: that logs.
            tells_training: whether what training logs of an epoch is there as well.

        Raises:
            UserError: if a chosen score is missing, or one of early stopping.
        """
        if self.has_looked:
            return
        self.has_looked = True
        every = list(trainer.callback_metrics)
        # A step's value, and a rate, are nothing that a checkpoint could be the best of.
        logged = [name for name in every if not name.startswith("lr-") and name[-5:] != "_step"]
        told = f"{type(pl_module).__name__} logs {', '.join(logged) or 'nothing'}"
        if not trainer.enable_validation:
            told = f"nothing is validated, and {told}"
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
        for callback in callbacks:
            monitor = getattr(callback, "monitor", None)
            if not isinstance(monitor, str) or monitor in every:
                continue
            if monitor.startswith("train") and not tells_training:
                continue  # it may come at the end of the epoch
            if isinstance(callback, EarlyStopping):
                raise UserError(f"Early stopping watches {monitor}, but {told}.")
            if isinstance(callback, ModelCheckpoint):
                hint = choices(monitor, logged)
                if monitor == self.chosen and trainer.enable_validation:
                    self.refusal = f"Nothing logs objective={monitor}: {told}.\n{hint}"
                    if is_overridden("on_train_epoch_end", pl_module):
                        continue  # which may log it yet; Lightning refuses if it does not
                    raise UserError(self.refusal)
                self.watched[callback], callback.monitor = monitor, None
                if trainer.is_global_zero:
                    text = "best.ckpt is the newest checkpoint: nothing logs objective=%s (%s). %s"
                    log.warning(text, monitor, told, hint)


@contextmanager
def explaining(trainer: pl.Trainer) -> Iterator[None]:
    """Say what to type where Lightning finds that the last hook has not logged the score either.

    Raises:
        UserError: instead of Lightning's exception.
    """
    try:
        yield
    except MisconfigurationException as error:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
        said = [c.refusal for c in callbacks if isinstance(c, Objective) and c.refusal]
        if not said or "could not find the monitored key" not in str(error):
            raise
        raise UserError(said[0]) from error


def saves_at_epoch_end(trainer: pl.Trainer) -> bool:
    """Whether a checkpoint is written when an epoch ends, and not after a validation in it."""
    is_once = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
    return is_once or not trainer.enable_validation


def choices(monitor: str, logged: list[str]) -> str:
    """What to type as ``objective=``."""
    if not logged:
        return "Log a score to choose it with objective=."
    close = difflib.get_close_matches(monitor, logged, n=1, cutoff=0.5)
    word = f"Did you mean objective={close[0]}" if close else "Choose one with objective=<name>"
    return f"{word} mode=min (or mode=max){'?' if close else '.'}"
