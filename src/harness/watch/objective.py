import difflib
import logging
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from harness.errors import UserError

log = logging.getLogger(__name__)


class Objective(pl.Callback):
    """Say which monitored score nothing logs, after the first validation instead of never.

    Without that score the best checkpoint is the last one. Early stopping cannot do without: the
    run stops.
    """

    has_looked = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Where nothing is validated, no score of a validation will come."""
        self.has_looked = False
        if not trainer.enable_validation:
            self.look(trainer, [], "nothing is validated")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare what was logged with what is monitored; called before those who monitor."""
        if not self.has_looked and not trainer.sanity_checking:
            logged = list(trainer.callback_metrics)
            self.look(trainer, logged, f"{type(pl_module).__name__} logs {', '.join(logged)}")

    def look(self, trainer: pl.Trainer, logged: list[str], reason: str) -> None:
        """Tell of each score that is missing; refuse early stopping without its own."""
        self.has_looked = True
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
        for callback in callbacks:
            monitor = getattr(callback, "monitor", None)
            if not isinstance(monitor, str) or monitor in logged or monitor.startswith("train"):
                continue  # what training logs may come at the end of the epoch
            if isinstance(callback, EarlyStopping):
                raise UserError(f"Early stopping watches {monitor}, but {reason}.")
            if isinstance(callback, ModelCheckpoint):
                callback.monitor = None
                close = difflib.get_close_matches(monitor, logged, n=1, cutoff=0.5)
                hint = f"Did you mean objective={close[0]}?" if close else "Choose with objective=."
                told = "best.ckpt is the last checkpoint: it is to be the best by %s, but %s. %s"
                log.warning(told, monitor, reason, hint)
