"""Refuse a checkpoint whose states of optimizers and schedulers would go elsewhere, or nowhere.

Lightning loads them by their order, without a word.
"""

import logging
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from harness.errors import UserError
from harness.places import shown

log = logging.getLogger(__name__)


class OptimizerStates(pl.Callback):
    """Note what optimizers know of parameters, and refuse a checkpoint that does not fit."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] | None = None
        self.groups: list[list[Any]] = []

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add what the optimizers' states lack: names of parameters, and what they began with."""
        checkpoint["optimized"] = optimized(trainer)
        checkpoint["optimizer_settings"] = optimizer_settings(trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what is compared when all of it is loaded."""
        self.loaded = {
            "optimized": checkpoint["optimized"],
            "settings": checkpoint["optimizer_settings"],
            "optimizers": len(checkpoint["optimizer_states"]),
            "schedulers": len(checkpoint["lr_schedulers"]),
            "groups": [shares(state["param_groups"]) for state in checkpoint["optimizer_states"]],
        }

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep how the code shares out parameters, which a checkpoint overrules."""
        self.groups = [shares(optimizer.param_groups) for optimizer in trainer.optimizers]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a state that went elsewhere.

        Raises:
            UserError: if the checkpoint's state is that of other optimizers or schedulers.
        """
        if self.loaded is None:
            return
        reason = misfit(self.loaded, trainer) or other_groups(self.loaded["groups"], self.groups)
        if reason:
            raise UserError(refusal(Path(str(trainer.ckpt_path)), reason))
        if trainer.is_global_zero:
            tell_settings(self.loaded["settings"], optimizer_settings(trainer))
        self.loaded = None


def refusal(checkpoint: Path, reason: str) -> str:
    """Say that no run goes on from a checkpoint with this code, and what to do."""
    return (
        f"{shown(checkpoint)} does not fit what the code builds today: {reason}\n"
        "Go back to the code that trained it, or use resume=null to start another run: "
        "scripts/convert_checkpoint.py takes the weights along."
    )


def optimized(trainer: pl.Trainer) -> list[list[str]]:
    """The names of the parameters of each optimizer, in the order in which it knows them."""
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
    return [
        [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
        for optimizer in trainer.optimizers
    ]


def optimizer_settings(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """What each optimizer is built with, such as its learning rate: numbers and the like."""
    plain = (bool, int, float, str, type(None))
    return [
        {
            name: value
            for name, value in optimizer.defaults.items()
            if type(value) in plain and name in optimizer.param_groups[0]  # torch adds others later
        }
        for optimizer in trainer.optimizers
    ]


def tell_settings(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Say which settings of optimizers have no effect in a run that goes on."""
    changed = [
        f"{name}={one[name]} (now {other[name]})"
        for one, other in zip(before, now, strict=False)
        for name in one.keys() & other.keys()
        if one[name] != other[name]
    ]
    if changed:
        log.warning(
            "The optimizer goes on with the checkpoint's settings, and what it is built with now "
            "has no effect: %s.\nStart another run for other settings: use resume=null.",
            ", ".join(sorted(changed)),
        )


def shares(groups: list[dict[str, Any]]) -> list[Any]:
    """The names and factors of an optimizer's groups, where ``parameter_groups`` has made them."""
    return [(g.get("name"), g["lr_factor"]) if "lr_factor" in g else None for g in groups]


def other_groups(before: list[list[Any]], now: list[list[Any]]) -> str | None:
    """What of groups of the same sizes is not as it was."""
    for old, new in zip(before, now, strict=False):
        for one, other in zip(old, new, strict=False):
            if one != other:
                return f"its group of parameters {one} would be {other}."
    return None


def misfit(loaded: dict[str, Any], trainer: pl.Trainer) -> str | None:
    """What of the optimizers' and schedulers' states went elsewhere, or nowhere.

    Args:
        loaded: see ``OptimizerStates.on_load_checkpoint``.
        trainer: has taken what it could.
    """
    counts = {"optimizers": len(trainer.optimizers)}
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
    # This one gives a scheduler of its own later.
    if not any(isinstance(c, pl.callbacks.StochasticWeightAveraging) for c in callbacks):
        counts["schedulers"] = len(trainer.lr_scheduler_configs)
    for kind, today in counts.items():
        if today != loaded[kind]:
            return f"it has {loaded[kind]} {kind}, and configure_optimizers gives {today}."
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            there = {*group, "differentiable"}  # which torch adds as any state is loaded
            if missing := [name for name in optimizer.defaults if name not in there]:
                return f"it has no {', '.join(missing)} for {type(optimizer).__name__}."
    known = {name for name, _ in trainer.lightning_module.named_parameters()}
    for before, today_names in zip(loaded["optimized"], optimized(trainer), strict=False):
        for name, other in zip(before, today_names, strict=False):
            if name != other and name in known:  # else it was renamed as it was loaded
                return f"what an optimizer knows of {name} would go to {other}."
    return None
