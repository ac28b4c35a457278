"""Build the optimizer and the schedule of a module from its settings."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytorch_lightning as pl
from torch.optim import Optimizer

from harness.errors import UserError
from harness.groups import parameter_groups

RATES = ("max_lr", "base_lr")  # of schedulers that set rates themselves: OneCycleLR, CyclicLR


def build_optimizers(
    module: pl.LightningModule,
    optimizer: Callable[..., Optimizer],
    scheduler: Callable[..., Any] | None = None,
    interval: str = "step",
    monitor: str = "val/loss",
    parameters: Iterable[Any] | None = None,
    groups: Mapping[str, Any] | None = None,
) -> Any:
    """Build what ``configure_optimizers`` returns, of what the configuration gave.

    Args:
        module: the module that is trained.
        optimizer: called with the parameters, for example ``partial(AdamW, lr=1e-3)``.
        scheduler: called with the optimizer, and with the run's ``total_steps`` if it takes them.
        interval: ``"step"`` or ``"epoch"``, after which the scheduler advances.
        monitor: the logged value that ``ReduceLROnPlateau`` looks at.
        parameters: parameters or groups of them; ``None`` takes all of the module.
        groups: arguments of ``parameter_groups``, in place of ``parameters``.

    Raises:
        UserError: if the scheduler plans for the whole run, and the run has no end.
    """
    if given := {k: v for k, v in (groups or {}).items() if v not in (None, {}, True)}:
        if parameters is not None:
            raise ValueError("Give parameters or groups, not both.")
        rate = inspect.signature(optimizer).parameters.get("lr")
        if rate is None or not isinstance(rate.default, (int, float)):
            raise UserError("groups are shares of the optimizer's learning rate: set its lr.")
        parameters = parameter_groups(module, float(rate.default), **given)
    built = optimizer(parameters or module.parameters())
    if scheduler is None:
        return built
    made = completed(scheduler, built, module)(built)
    schedule = {"scheduler": made, "interval": interval, "monitor": monitor}
    return {"optimizer": built, "lr_scheduler": schedule}


def completed(
    scheduler: Callable[..., Any], optimizer: Optimizer, module: pl.LightningModule
) -> Callable[..., Any]:
    """Give a scheduler the run's number of steps, and the groups' rates if it sets rates itself."""
    given: dict[str, Any] = {}
    for name, argument in inspect.signature(scheduler).parameters.items():
        if name in RATES and isinstance(argument.default, (int, float)):
            shares = [group.get("lr_factor", 1.0) for group in optimizer.param_groups]
            given[name] = [argument.default * share for share in shares]
        if name == "total_steps" and argument.default is None:
            given[name] = module.trainer.estimated_stepping_batches
            if given[name] == float("inf"):
                raise UserError(
                    "model.scheduler plans for the whole run: set trainer.max_epochs or max_steps, "
                    "or leave it out with ~model.scheduler +model.scheduler=null."
                )
    return partial(scheduler, **given)
