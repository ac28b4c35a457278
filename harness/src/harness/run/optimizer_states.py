"""Refuse a checkpoint whose states of optimizers and schedules would go elsewhere, or nowhere.

Lightning and torch load them by their order, without a word.
"""

import logging
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from harness.errors import UserError
from harness.places import shown

log = logging.getLogger(__name__)
PLAIN = (bool, int, float, str, type(None))


class OptimizerStates(pl.Callback):
    """Add to a checkpoint what its optimizers are; refuse one that does not fit today's."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None
        self.settings: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the settings of the code, before those of a checkpoint replace them."""
        self.settings = [settings(optimizer) for optimizer in trainer.optimizers]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the classes of optimizers, the names of their parameters, and their settings."""
        checkpoint["optimized"] = description(trainer) | {"settings": self.settings}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what is compared when all of the checkpoint is loaded."""
        self.saved = checkpoint["optimized"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the checkpoint with what the code has built.

        Raises:
            UserError: if its states are those of other optimizers, parameters or schedules.
        """
        saved, self.saved = self.saved, None
        if saved is None:
            return
        if reason := misfit(saved, description(trainer)):
            raise UserError(refusal(Path(str(trainer.ckpt_path)), reason))
        changed = [
            f"{name}={old[name]} (now {new[name]})"
            for old, new in zip(saved["settings"], self.settings, strict=False)
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
    """Say that no run goes on from a checkpoint with this code, and what to do."""
    return (
        f"{shown(checkpoint)} does not fit what the code builds today: {reason}\n"
        "Go back to the code that trained it, or use resume=null to start another run: "
        "scripts/convert_checkpoint.py takes the weights along."
    )


def description(trainer: pl.Trainer) -> dict[str, Any]:
    """The optimizers' classes, the names of their parameters in order, the schedules' classes."""
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
    }


def settings(optimizer: Any) -> dict[str, Any]:
    """What an optimizer is built with, such as its rate, and the factors of its groups."""
    groups = optimizer.param_groups
    # torch adds to the groups later, as when it loads a state.
    named = {k: v for k, v in optimizer.defaults.items() if type(v) in PLAIN and k in groups[0]}
    factors = {f"lr_factor of {g.get('name')}": g["lr_factor"] for g in groups if "lr_factor" in g}
    return named | factors


def misfit(saved: dict[str, Any], today: dict[str, Any]) -> str | None:
    """Say which state would go elsewhere, or nowhere."""
    for kind in ("optimizers", "schedules"):
        if saved[kind] != today[kind]:
            old, new = (", ".join(one[kind]) or "none" for one in (saved, today))
            return f"its {kind} are {old}, and configure_optimizers gives {new}."
    for old_names, new_names in zip(saved["names"], today["names"], strict=True):
        for old, new in zip(old_names, new_names, strict=False):  # torch has compared their number
            if old != new and old in new_names:  # else it was renamed as it was loaded
                return f"the optimizer's state of {old} would go to {new}."
    return None
