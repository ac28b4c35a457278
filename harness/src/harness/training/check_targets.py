"""Check that what a config names exists, takes its arguments, and is of the right kind.

In: the config, before anything is built; then the objects, before the Trainer gets them.
"""

import inspect
from typing import Any, get_args

import pytorch_lightning as pl
from pytorch_lightning.callbacks import BatchSizeFinder, LearningRateFinder
from pytorch_lightning.loggers import Logger
from torch import nn

from harness.data.facts import PREFIX
from harness.errors import UserError
from harness.suggestions import suggest
from harness.targets import import_targets

NUMBERS = {int, float, type(None)}
HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}


def check_targets(cfg: Any) -> None:
    """Check every ``_target_`` of a config and its arguments before any of them is called.

    Raises:
        UserError: with the key, and the nearest name or argument; see also ``import_targets``.
    """
    for key, node, called in import_targets(cfg):
        target = node["_target_"]
        try:
            parameters = inspect.signature(called).parameters
        except ValueError:
            continue  # written in C
        for name in parameters.keys() & node.keys():
            kind, value = parameters[name].annotation, node[name]
            is_text = isinstance(value, str) and not value.startswith(PREFIX)
            if is_text and {*(get_args(kind) or (kind,))} <= NUMBERS:
                raise UserError(f"{key}.{name}={value} must be a number, as {target} says.")
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        for name in [] if takes_any else map(str, node):
            if name not in {*parameters, *HYDRA_KEYS}:
                hint = suggest(name, parameters) or f" It takes {', '.join(parameters)}."
                raise UserError(f"{key}: {target} has no argument {name}.{hint}")


def check_kinds(model: Any, data: Any, callbacks: list[Any], loggers: list[Any]) -> None:
    """Refuse objects that the Trainer could not use; without data the model has the loaders."""
    built: list[tuple[str, Any, type]] = [("model", model, pl.LightningModule)]
    built += [("data", data, pl.LightningDataModule)] if data is not None else []
    built += [("callbacks", callback, pl.Callback) for callback in callbacks]
    built += [("logger", logger, Logger) for logger in loggers]
    for key, value, kind in built:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, (BatchSizeFinder, LearningRateFinder)):
            raise UserError(
                f"{key}: {name} trains first and then goes back, which no run can.\n"
                "Use pytorch_lightning.tuner.Tuner in a notebook, or try values: -m <key>=<a>,<b>"
            )
        if not isinstance(value, kind):
            hint = ""
            if any(one.__module__.startswith("lightning.pytorch") for one in type(value).__mro__):
                hint = " lightning.pytorch was imported before harness: import harness first."
            elif isinstance(value, nn.Module):
                hint = " A network is an argument of the LightningModule that trains it."
            raise UserError(f"{key}: {name} is not a {kind.__name__}.{hint}")
