"""Check that what a config names exists, takes its arguments, and is of the right kind.

In: the config, before anything is built; then the objects, before the Trainer gets them.
"""

import inspect
import sys
from typing import Any, get_args

import pytorch_lightning as pl
from hydra.errors import InstantiationException
from hydra.utils import get_object
from pytorch_lightning.loggers import Logger
from torch import nn

from harness.allowed import check, check_object, targets
from harness.data.facts import PREFIX
from harness.errors import UserError
from harness.names import did_you_mean

EXTRAS = {"timm": "timm", "tokenizers": "text"}  # by the package they install
NUMBERS = {int, float, type(None)}
HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}


def check_targets(cfg: Any) -> None:
    """Check every ``_target_`` of a config before any of them is called, or imported.

    Raises:
        UserError: with the key, and the nearest real name, or the line that allows it.
        InstantiationException: if a module exists and raises as it is imported.
    """
    check(cfg)
    for key, node in targets(cfg):
        target = node["_target_"]
        try:
            parameters = inspect.signature(import_target(key, target)).parameters
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
                hint = did_you_mean(name, parameters) or f" It takes {', '.join(parameters)}."
                raise UserError(f"{key}: {target} has no argument {name}.{hint}")


def import_target(key: str, target: str) -> Any:
    """Import what a ``_target_`` names, and check that it may be called."""
    try:
        called = get_object(target)
    except ImportError as error:
        cause = error.__cause__
        absent = str(cause.name) if isinstance(cause, ModuleNotFoundError) else ""
        parent, _, name = (absent or target).rpartition(".")
        is_absent = absent and f"{target}.".startswith(f"{absent}.")
        if not is_absent and "is an attribute of" not in str(error):
            # The module exists and raises: not a typo in the config.
            raise InstantiationException(f"{target}\nfull_key: {key}") from cause
        hint = (
            did_you_mean(name, vars(sys.modules.get(parent, sys)), f"{parent}.") if parent else ""
        )
        if absent in EXTRAS:
            hint = f" Install it: pip install -e '.[{EXTRAS[absent]}]'."
        raise UserError(f"{key}._target_: {target} does not exist.{hint}") from error
    check_object(key, target, called)
    return called


def check_kinds(model: Any, data: Any, callbacks: list[Any], loggers: list[Any]) -> None:
    """Refuse objects that the Trainer could not use; without data the model has the loaders."""
    built: list[tuple[str, Any, type]] = [("model", model, pl.LightningModule)]
    built += [("data", data, pl.LightningDataModule)] if data is not None else []
    built += [("callbacks", callback, pl.Callback) for callback in callbacks]
    built += [("logger", logger, Logger) for logger in loggers]
    for key, value, kind in built:
        if not isinstance(value, kind):
            hint = ""
            if any(one.__module__.startswith("lightning.pytorch") for one in type(value).__mro__):
                hint = " lightning.pytorch was imported before harness: import harness first."
            elif isinstance(value, nn.Module):
                hint = " A network is an argument of the LightningModule that trains it."
            name = f"{type(value).__module__}.{type(value).__qualname__}"
            raise UserError(f"{key}: {name} is not a {kind.__name__}.{hint}")
