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
        scheduler: called with the optimizer. If it takes ``total_steps`` and none is bound, the
            run's number of optimizer steps is filled in.
        interval: ``"step"`` or ``"epoch"``, after which the scheduler advances.
        monitor: the logged value that ``ReduceLROnPlateau`` looks at.
        parameters: parameters or groups of them; ``None`` takes all of the module.
        groups: arguments of ``parameter_groups``, which makes groups of all of the module; where
            none is set, all parameters stay in one.

    Raises:
        UserError: if the scheduler plans for the whole run, and the run has no end, or ``groups``
            has an unknown name.
    """
    names = [*inspect.signature(parameter_groups).parameters][2:]
    if unknown := [name for name in groups or {} if name not in names]:
        raise UserError(f"groups: there is no {unknown[0]}. Use {', '.join(names)}.")
    given = {k: v for k, v in (groups or {}).items() if v not in (None, {}, True)}
    if given:
        if parameters is not None:
            raise ValueError("Give parameters or groups, of which the latter makes the former.")
        rate = inspect.signature(optimizer).parameters.get("lr")
        if rate is None or not isinstance(rate.default, (int, float)):
            raise UserError("groups are shares of the optimizer's learning rate: set its lr.")
        parameters = parameter_groups(module, float(rate.default), **given)
    built = optimizer(parameters or module.parameters())
    if scheduler is None:
        return built
    scheduler = with_rates_of_groups(scheduler, built)
    arguments = inspect.signature(scheduler).parameters
    if "total_steps" in arguments and arguments["total_steps"].default is None:
        num_steps = module.trainer.estimated_stepping_batches
        if num_steps == float("inf"):
            raise UserError(
                "model.scheduler needs to know when the run ends, to plan its steps.\n"
                "Set trainer.max_epochs or trainer.max_steps, or leave it out with "
                "~model.scheduler +model.scheduler=null."
            )
        scheduler = partial(scheduler, total_steps=int(num_steps))
    schedule = {"scheduler": scheduler(built), "interval": interval, "monitor": monitor}
    return {"optimizer": built, "lr_scheduler": schedule}


def with_rates_of_groups(scheduler: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
    """Give a scheduler that sets rates itself those of groups that learn slower or faster."""
    factors = [group.get("lr_factor", 1.0) for group in optimizer.param_groups]
    rates = {
        name: [parameter.default * factor for factor in factors]
        for name, parameter in inspect.signature(scheduler).parameters.items()
        if name in RATES and isinstance(parameter.default, (int, float))
    }
    return scheduler if {*factors} == {1.0} else partial(scheduler, **rates)
