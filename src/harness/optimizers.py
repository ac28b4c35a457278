import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytorch_lightning as pl
from torch.optim import Optimizer

from harness.errors import UserError


def build_optimizers(
    module: pl.LightningModule,
    optimizer: Callable[..., Optimizer],
    scheduler: Callable[..., Any] | None = None,
    interval: str = "step",
    monitor: str = "val/loss",
    parameters: Iterable[Any] | None = None,
) -> Any:
    """Build what ``configure_optimizers`` returns, of what the configuration gave.

    Args:
        module: the module that is trained.
        optimizer: called with the parameters, for example ``partial(AdamW, lr=1e-3)``.
        scheduler: called with the optimizer. If it takes ``total_steps`` and none is bound, the
            run's number of optimizer steps is filled in.
        interval: ``"step"`` or ``"epoch"``, after which the scheduler advances.
        monitor: the logged value that ``ReduceLROnPlateau`` looks at.
        parameters: parameters or groups of them; ``None`` takes all of the module.

    Raises:
        UserError: if the scheduler plans for the whole run, and the run has no end.
    """
    built = optimizer(parameters or module.parameters())
    if scheduler is None:
        return built
    arguments = inspect.signature(scheduler).parameters
    if "total_steps" in arguments and arguments["total_steps"].default is None:
        scheduler = partial(scheduler, total_steps=num_steps(module.trainer))
    schedule = {"scheduler": scheduler(built), "interval": interval, "monitor": monitor}
    return {"optimizer": built, "lr_scheduler": schedule}


def num_steps(trainer: pl.Trainer) -> int:
    """Optimizer steps of the whole run."""
    steps = trainer.estimated_stepping_batches
    if steps == float("inf"):
        raise UserError(
            "model.scheduler needs to know when the run ends, to plan its steps.\n"
            "Set trainer.max_epochs or trainer.max_steps, or leave it out with "
            "~model.scheduler +model.scheduler=null."
        )
    return int(steps)
