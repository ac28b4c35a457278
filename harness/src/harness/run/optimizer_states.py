"""Refuse a checkpoint whose states of optimizers and schedules do not belong to today's.

Lightning and torch load them by their order, without a check.
"""

import logging
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from harness.errors import UserError
from harness.names import shown

log = logging.getLogger(__name__)
PLAIN = (bool, int, float, str, type(None))


class OptimizerStates(pl.Callback):
    """Describe the optimizers in a checkpoint; refuse one that does not fit today's."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the classes of optimizers, the names of their parameters, and their settings."""
        checkpoint["optimized"] = description(trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what is compared when the whole checkpoint is loaded."""
        self.saved = checkpoint["optimized"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the checkpoint with what the code has built.

        Raises:
            UserError: if its states are those of other optimizers, parameters or schedules.
        """
        saved, self.saved = self.saved, None
        if saved is None:
            return
        today = description(trainer)
        if reason := misfit(saved, today):
            raise UserError(refusal(Path(str(trainer.ckpt_path)), reason))
        changed = [
            f"{name}={old[name]} (now {new[name]})"
            for old, new in zip(saved["settings"], today["settings"], strict=False)
            for name in sorted(old.keys() & new.keys())
            if old[name] != new[name]
        ]
        if changed and trainer.is_global_zero:
            log.warning(
                "The optimizer goes on with the checkpoint's settings, and what it is built with "
                "now has no effect: %s.\nStart another run for other settings: use resume=null.",
                ", ".join(changed),
            )


def refusal(checkpoint: Path, reason: str) -> str:
    """Say that this code cannot go on from a checkpoint, and what to do."""
    return (
        f"{shown(checkpoint)} does not fit what the code builds today: {reason}\n"
        "Go back to the code that trained it, or use resume=null to start another run: "
        "scripts/convert_checkpoint.py takes the weights along."
    )


def description(trainer: pl.Trainer) -> dict[str, Any]:
    """Return classes and settings of optimizers, parameter names in order, classes of schedules."""
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
    # Stochastic weight averaging replaces the schedule in the course of the run.
    is_swa = any(isinstance(c, pl.callbacks.StochasticWeightAveraging) for c in callbacks)
    schedules = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
    return {
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
        "schedules": [] if is_swa else schedules,
        "names": [
            [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
            for optimizer in trainer.optimizers
        ],
        "settings": [  # as the code gives them: a state that is loaded replaces the groups alone
            {k: v for k, v in optimizer.defaults.items() if type(v) in PLAIN}
            for optimizer in trainer.optimizers
        ],
    }


def misfit(saved: dict[str, Any], today: dict[str, Any]) -> str | None:
    """Name a state that would be loaded into another parameter, or into none."""
    for kind in ("optimizers", "schedules"):
        if saved[kind] != today[kind]:
            old, new = (", ".join(one[kind]) or "none" for one in (saved, today))
            return f"its {kind} are {old}, and configure_optimizers gives {new}."
    for old_names, new_names in zip(saved["names"], today["names"], strict=True):
        for old, new in zip(old_names, new_names, strict=False):  # torch has compared their number
            if old != new and old in new_names:  # else it was renamed as it was loaded
                return f"the optimizer's state of {old} would go to {new}."
    return None
