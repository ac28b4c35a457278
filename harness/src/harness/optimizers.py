"""Build a module's optimizer and learning rate scheduler from its settings."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytorch_lightning as pl
from torch import nn
from torch.optim import Optimizer

from harness.errors import UserError
from harness.init.settings import bare_name, check_parts
from harness.keys import is_within

RATES = ("max_lr", "base_lr")  # arguments by which OneCycleLR and CyclicLR set rates


def build_optimizers(
    module: pl.LightningModule,
    optimizer: Callable[..., Optimizer],
    scheduler: Callable[..., Any] | None = None,
    interval: str = "step",
    monitor: str = "val/loss",
    parameters: Iterable[Any] | None = None,
    groups: Mapping[str, Any] | None = None,
) -> Any:
    """Return the value for ``configure_optimizers``: an optimizer, perhaps with a scheduler.

    Args:
        module: the module that is trained.
        optimizer: called with the parameters, for example ``partial(AdamW, lr=1e-3)``.
        scheduler: called with the optimizer, and with the run's ``total_steps`` if it has such an
            argument.
        interval: ``"step"`` or ``"epoch"``, after which the scheduler advances.
        monitor: the metric for ``ReduceLROnPlateau``.
        parameters: parameters or groups of them; ``None`` means all parameters of the module.
        groups: arguments of ``parameter_groups``, in place of ``parameters``.

    Raises:
        UserError: the scheduler needs the run's number of steps, but the run has no end.
    """
    if options := {k: v for k, v in (groups or {}).items() if v not in (None, {}, True)}:
        if parameters is not None:
            raise ValueError("Give parameters or groups, not both.")
        rate = inspect.signature(optimizer).parameters.get("lr")
        if rate is None or not isinstance(rate.default, (int, float)):
            raise UserError(
                "groups multiply the optimizer's learning rate, but the optimizer has no "
                "learning rate. Set model.optimizer.lr."
            )
        parameters = parameter_groups(module, float(rate.default), **options)
    built = optimizer(parameters or module.parameters())
    if scheduler is None:
        return built
    built_scheduler = complete_scheduler(scheduler, built, module)(built)
    schedule = {"scheduler": built_scheduler, "interval": interval, "monitor": monitor}
    return {"optimizer": built, "lr_scheduler": schedule}


def complete_scheduler(
    scheduler: Callable[..., Any], optimizer: Optimizer, module: pl.LightningModule
) -> Callable[..., Any]:
    """Return a scheduler with its missing arguments.

    These are the run's ``total_steps``, and a rate per group for a scheduler that sets rates
    itself.
    """
    filled_in: dict[str, Any] = {}
    for name, argument in inspect.signature(scheduler).parameters.items():
        if name in RATES and isinstance(argument.default, (int, float)):
            factors = [group.get("lr_factor", 1.0) for group in optimizer.param_groups]
            filled_in[name] = [argument.default * factor for factor in factors]
        if name == "total_steps" and argument.default is None:
            filled_in[name] = module.trainer.estimated_stepping_batches
            if not 0 < filled_in[name] < float("inf"):  # -1 for a stream without a length
                no_batch = "data.drop_last=true may leave no batch. " if not filled_in[name] else ""
                raise UserError(
                    "model.scheduler needs the run's number of steps, but Lightning estimates "
                    f"{filled_in[name]} steps.\n{no_batch}Set trainer.max_steps=<n>, or use "
                    "model/scheduler=constant."
                )
    return partial(scheduler, **filled_in)


def parameter_groups(
    module: nn.Module,
    lr: float,
    lr_factors: Mapping[str, float] | None = None,
    decay_norms: bool = True,
) -> list[dict[str, Any]]:
    """Split a module's parameters into groups for a ``torch.optim.Optimizer``.

    Use it in any ``configure_optimizers``:
    ``AdamW(harness.parameter_groups(self, lr=1e-3, decay_norms=False), lr=1e-3)``.
    The groups contain frozen parameters as well, because these may be trained later.

    Args:
        module: usually the LightningModule.
        lr: learning rate of parameters without a factor.
        lr_factors: factors of ``lr`` by the names of submodules, such as ``net.backbone``. If
            submodules contain each other, the factor of the inner one counts.
        decay_norms: ``False`` sets the ``weight_decay`` of biases, norms and other vectors to 0.

    Raises:
        UserError: a factor is not above 0, or a submodule does not exist.
    """
    factors = lr_factors or {}
    check_parts("lr_factors", factors, [bare_name(name) for name, _ in module.named_parameters()])
    for part, factor in factors.items():
        if not factor > 0:
            raise UserError(
                f"lr_factors.{part}={factor} must be more than 0. To freeze {part}, set "
                f"init.freeze=[{part}]."
            )
    groups: dict[str, dict[str, Any]] = {}
    for full_name, parameter in module.named_parameters():
        name, layer = bare_name(full_name), module.get_submodule(full_name.rpartition(".")[0])
        part = max((part for part in factors if is_within(name, [part])), key=len, default="")
        is_vector = parameter.ndim <= 1 or name.endswith("bias") or "Norm" in type(layer).__name__
        settings = {} if decay_norms or not is_vector else {"weight_decay": 0.0}
        factor, key = factors.get(part, 1.0), part + "/no_decay" * bool(settings)
        group = {
            "name": key.strip("/") or "other",  # LearningRateMonitor logs it
            "params": [],
            "lr": lr * factor,
            "lr_factor": factor,
        }
        groups.setdefault(key, group | settings)["params"].append(parameter)
    return list(groups.values())
