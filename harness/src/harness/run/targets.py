"""Check that what a config names exists, takes its arguments, and is of the right kind.

In: the config, before anything is built; then the objects, before the Trainer gets them.
"""

import importlib
import inspect
from typing import Any

import pytorch_lightning as pl
from hydra.errors import InstantiationException
from hydra.utils import get_object
from pytorch_lightning.loggers import Logger
from torch import nn

from harness.allowed import check, check_object, targets
from harness.errors import UserError
from harness.names import did_you_mean

EXTRAS = {"timm": "timm", "tokenizers": "text"}  # by the package they install
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
        called = import_target(key, target)
        try:
            parameters = inspect.signature(called).parameters
        except ValueError:
            continue  # written in C
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue
        for name in map(str, node):
            if name not in {*parameters, *HYDRA_KEYS}:
                hint = did_you_mean(name, parameters)
                raise UserError(
                    f"{key}: {target} has no argument {name}."
                    + (hint or f" It takes {', '.join(parameters)}. Leave it out: ~{key}.{name}")
                )


def import_target(key: str, target: str) -> Any:
    """Import what a ``_target_`` names, and check that it may be called."""
    module_name, _, name = target.rpartition(".")
    try:
        called = get_object(target)
    except ImportError as error:
        try:
            names = vars(importlib.import_module(module_name))
            hint = did_you_mean(name, names, f"{module_name}.")
        except Exception as failed:
            missing = failed.name if isinstance(failed, ModuleNotFoundError) else "."
            if not f"{module_name}.".startswith(f"{missing}."):
                # The module of the name exists and raises: not a typo in the config.
                raise InstantiationException(f"{target}\nfull_key: {key}") from failed
            hint = f" There is no module {missing}."
            if missing in EXTRAS:
                hint = f" Install it: pip install -e '.[{EXTRAS[missing]}]'."
        raise UserError(f"{key}._target_: {target} does not exist.{hint}") from error
    check_object(key, target, called)
    if not callable(called):
        raise UserError(f"{key}._target_: {target} is not a class or a function.")
    return called


def check_kinds(model: Any, data: Any, callbacks: list[Any], loggers: list[Any]) -> None:
    """Refuse objects that the Trainer could not use; without data the model has the loaders.

    Raises:
        UserError: with the key and what it must be.
    """
    built: list[tuple[str, Any, type]] = [("model", model, pl.LightningModule)]
    built += [("data", data, pl.LightningDataModule)] if data is not None else []
    built += [("callbacks", callback, pl.Callback) for callback in callbacks]
    built += [("logger", logger, Logger) for logger in loggers]
    for key, value, kind in built:
        if isinstance(value, kind):
            continue
        hint = ""
        if any(one.__module__.startswith("lightning.pytorch") for one in type(value).__mro__):
            hint = (
                " It is one of lightning.pytorch, which was imported before harness: import "
                "harness first (in a notebook, after a restart)."
            )
        elif isinstance(value, nn.Module):
            hint = " A network is an argument of the LightningModule that trains it."
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UserError(f"{key}: {name} is not a {kind.__name__}.{hint}")
