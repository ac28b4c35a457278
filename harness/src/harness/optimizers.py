"""Build the optimizer and the schedule of a module from its settings, with groups of parameters."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytorch_lightning as pl
from torch import nn
from torch.optim import Optimizer

from harness.errors import UserError
from harness.init.settings import bare, check_parts
from harness.names import is_below

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


def parameter_groups(
    module: nn.Module,
    lr: float,
    lr_factors: Mapping[str, float] | None = None,
    decay_norms: bool = True,
) -> list[dict[str, Any]]:
    """Split a module's parameters into groups, as a ``torch.optim.Optimizer`` takes them.

    ``AdamW(harness.parameter_groups(self, lr=1e-3, decay_norms=False), lr=1e-3)`` in any
    ``configure_optimizers``. Frozen parameters are in them too: they may be trained later.

    Args:
        module: usually the LightningModule; names of parts begin below it.
        lr: learning rate of what has no factor.
        lr_factors: shares of ``lr`` by the names of parts, such as ``net.backbone``; of parts
            inside of each other the inner one counts.
        decay_norms: ``False`` sets the ``weight_decay`` of biases, norms and other vectors to 0.

    Raises:
        UserError: if a factor is not above 0, or a part is not there.
    """
    factors = lr_factors or {}
    check_parts("lr_factors", factors, [bare(name) for name, _ in module.named_parameters()])
    for part, factor in factors.items():
        if not factor > 0:
            raise UserError(f"lr_factors.{part} must be more than 0; see init.freeze=[{part}].")
    groups: dict[str, dict[str, Any]] = {}
    for full_name, parameter in module.named_parameters():
        name, owner = bare(full_name), module.get_submodule(full_name.rpartition(".")[0])
        part = max((part for part in factors if is_below(name, [part])), key=len, default="")
        is_vector = parameter.ndim <= 1 or name.endswith("bias") or "Norm" in type(owner).__name__
        settings = {} if decay_norms or not is_vector else {"weight_decay": 0.0}
        share, place = factors.get(part, 1.0), part + "/no_decay" * bool(settings)
        # LearningRateMonitor shows the name.
        group = {
            "name": place.strip("/") or "other",
            "params": [],
            "lr": lr * share,
            "lr_factor": share,
        }
        groups.setdefault(place, group | settings)["params"].append(parameter)
    return list(groups.values())
