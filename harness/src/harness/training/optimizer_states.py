"""Refuse to resume from a checkpoint of other optimizers, schedules or parameters.

In: the optimizers, when a checkpoint is written and when a resumed run begins. Lightning does not
compare them: it would load one parameter's optimizer state into another parameter.
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
    """Store a description of the optimizers in each checkpoint; compare it when a run resumes."""

    saved: dict[str, Any] | None = None  # the description in the checkpoint

    def on_save_checkpoint(self, trainer: pl.Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        """Add the description of the optimizers to a checkpoint."""
        checkpoint["optimized"] = describe_optimizers(trainer)

    def on_load_checkpoint(self, trainer: pl.Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the description until ``on_train_start``, and copy mapped tensors.

        Tensors of a checkpoint are mapped from its file. Optimizers keep some of them without a
        copy: all on the CPU, and the step counts on a GPU. The file would then use disk space until
        the run ends, even if it is deleted.
        """
        self.saved = checkpoint["optimized"]
        is_on_cpu = trainer.strategy.root_device.type == "cpu"
        checkpoint["optimizer_states"] = apply_to_collection(
            checkpoint["optimizer_states"],
            Tensor,
            lambda tensor: tensor.clone() if is_on_cpu or not tensor.ndim else tensor,
        )

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Raise a ``UserError`` if the optimizers do not match the checkpoint's."""
        current = describe_optimizers(trainer)
        saved, self.saved = self.saved or current, None
        for kind in ("optimizers", "schedules"):
            before, now = (", ".join(names[kind]) or "none" for names in (saved, current))
            if before != now:
                reason = f"its {kind} are {before}, and configure_optimizers returns {now}."
                raise UserError(describe_misfit(Path(str(trainer.ckpt_path)), reason))
        for names in zip(saved["names"], current["names"], strict=True):
            for before, now in zip(*names, strict=False):  # torch has compared the lengths
                # If ``before`` no longer exists, the parameter was only renamed.
                if before != now and before in names[1]:
                    reason = f"{now} would get the optimizer's state of {before}."
                    raise UserError(describe_misfit(Path(str(trainer.ckpt_path)), reason))


def describe_misfit(checkpoint: Path, reason: str) -> str:
    """Return a message for a checkpoint that the current code cannot resume from."""
    return (
        f"{display_path(checkpoint)} does not fit what the code builds today: {reason}\nGo back "
        "to the code that wrote the checkpoint, or use resume=null to start another run. "
        "scripts/convert_checkpoint.py extracts the weights for that run."
    )


def describe_optimizers(trainer: pl.Trainer) -> dict[str, list[Any]]:
    """Return the classes of optimizers and schedules, and each optimizer's parameter names."""
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
    # Stochastic weight averaging replaces the schedule during the run.
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
