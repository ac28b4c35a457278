"""Refuse a checkpoint whose states of optimizers do not belong to today's: Lightning does not look.

In: the optimizers, when a checkpoint is written and when a resumed run begins.
"""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from harness.compat import callbacks_of
from harness.display import display_path
from harness.errors import UserError


class OptimizerStates(pl.Callback):
    """Describe the optimizers in a checkpoint, and compare them where a run goes on from it."""

    saved: dict[str, Any] | None = None

    def on_save_checkpoint(self, trainer: pl.Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        """Add the classes of optimizers and schedules, and the names of parameters in order."""
        checkpoint["optimized"] = description(trainer)

    def on_load_checkpoint(self, trainer: pl.Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        """Keep what is compared when the whole checkpoint is loaded.

        What optimizers keep as it is, on the CPU all and on a GPU their counts of steps, becomes a
        copy: a file of which a part is in use would need its room on the disk until the run ends.
        """
        self.saved = checkpoint["optimized"]
        is_on_cpu = trainer.strategy.root_device.type == "cpu"
        checkpoint["optimizer_states"] = apply_to_collection(
            checkpoint["optimizer_states"],
            Tensor,
            lambda tensor: tensor.clone() if is_on_cpu or not tensor.ndim else tensor,
        )

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Refuse states of other optimizers, parameters or schedules, with a UserError."""
        now = description(trainer)
        old, self.saved = self.saved or now, None
        for kind in ("optimizers", "schedules"):
            before, today = (", ".join(one[kind]) or "none" for one in (old, now))
            if before != today:
                reason = f"its {kind} are {before}, and configure_optimizers gives {today}."
                raise UserError(describe_misfit(Path(str(trainer.ckpt_path)), reason))
        for names in zip(old["names"], now["names"], strict=True):
            for before, today in zip(*names, strict=False):  # torch has compared their number
                if before != today and before in names[1]:  # else it was renamed as it was loaded
                    reason = f"the optimizer's state of {before} would go to {today}."
                    raise UserError(describe_misfit(Path(str(trainer.ckpt_path)), reason))


def describe_misfit(checkpoint: Path, reason: str) -> str:
    """Say that this code cannot go on from a checkpoint, and what to do."""
    return (
        f"{display_path(checkpoint)} does not fit what the code builds today: {reason}\n"
        "Go back to the code that trained it, or use resume=null to start another run: "
        "scripts/convert_checkpoint.py takes the weights along."
    )


def description(trainer: pl.Trainer) -> dict[str, list[Any]]:
    """Return classes of optimizers and schedules, and names of parameters in order."""
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
    # Stochastic weight averaging replaces the schedule in the course of the run.
    is_swa = any(
        isinstance(c, pl.callbacks.StochasticWeightAveraging) for c in callbacks_of(trainer)
    )
    schedules = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
    groups = [[p for g in o.param_groups for p in g["params"]] for o in trainer.optimizers]
    return {
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
        "schedules": [] if is_swa else schedules,
        "names": [[names.get(id(p), "") for p in parameters] for parameters in groups],
    }
