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
        scheduler: called with the optimizer. If it takes ``total_steps`` and none is bound, the
            run's number of optimizer steps is filled in.
        interval: ``"step"`` or ``"epoch"``, after which the scheduler advances.
        monitor: the logged value that ``ReduceLROnPlateau`` looks at.
        parameters: parameters or groups of them; ``None`` takes all of the module.
        groups: arguments of ``parameter_groups``, which makes groups of all of the module.

    Raises:
        UserError: if the scheduler plans for the whole run, and the run has no end, or ``groups``
            names what there is not.
    """
    if given := settings_of(groups or {}):
        if parameters is not None:
            raise ValueError("Give parameters or groups, of which the latter makes the former.")
        parameters = parameter_groups(module, learning_rate(optimizer), **given)
    built = optimizer(parameters or module.parameters())
    if scheduler is None:
        return built
    scheduler = with_rates_of_groups(scheduler, built)
    arguments = inspect.signature(scheduler).parameters
    if "total_steps" in arguments and arguments["total_steps"].default is None:
        scheduler = partial(scheduler, total_steps=num_steps(module.trainer))
    schedule = {"scheduler": scheduler(built), "interval": interval, "monitor": monitor}
    return {"optimizer": built, "lr_scheduler": schedule}


def settings_of(groups: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make groups: without one, all parameters stay in one, as they were.

    Raises:
        UserError: if there is no such setting.
    """
    known = [*inspect.signature(parameter_groups).parameters][2:]
    for name in groups:
        if name not in known:
            raise UserError(f"groups: there is no {name}. Use {', '.join(known)}.")
    return {name: value for name, value in groups.items() if value not in (None, {}, True)}


def learning_rate(optimizer: Callable[..., Optimizer]) -> float:
    """What an optimizer that is still to be called will begin with.

    Raises:
        UserError: if it is not set.
    """
    parameter = inspect.signature(optimizer).parameters.get("lr")
    if parameter is None or not isinstance(parameter.default, (int, float)):
        raise UserError("groups are shares of the optimizer's learning rate: set its lr.")
    return float(parameter.default)


def with_rates_of_groups(scheduler: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
    """Give a scheduler that sets rates itself those of groups that learn slower or faster."""
    factors = [group.get("lr_factor", 1.0) for group in optimizer.param_groups]
    if {*factors} == {1.0}:
        return scheduler
    bound = {
        name: parameter.default
        for name, parameter in inspect.signature(scheduler).parameters.items()
        if name in RATES and isinstance(parameter.default, (int, float))
    }
    lists = {name: [rate * factor for factor in factors] for name, rate in bound.items()}
    return partial(scheduler, **lists) if lists else scheduler


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
