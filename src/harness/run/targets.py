"""Whether what a config names exists, and takes the arguments that it gets."""

import difflib
import importlib
import inspect
from typing import Any

import pytorch_lightning as pl
from hydra.utils import get_object
from omegaconf import OmegaConf
from pytorch_lightning.loggers import Logger
from torch import nn

from harness.errors import UserError
from harness.run.mistakes import at_build

HYDRA_KEYS = {"_target_", "_partial_", "_args_", "_convert_", "_recursive_"}


def check_targets(node: Any, key: str = "") -> None:
    """Check every ``_target_`` below ``node`` before any of them is called.

    Raises:
        UserError: with the key, and the nearest real name.
    """
    if OmegaConf.is_list(node):
        for i, child in enumerate(node):
            check_targets(child, f"{key}[{i}]")
    elif OmegaConf.is_dict(node):
        target = node.get("_target_")
        if target is not None:
            check_arguments(key, node, find(key, target))
        for name, child in node.items():
            check_targets(child, f"{key}.{name}" if key else str(name))


def find(key: str, target: str) -> Any:
    """Import what a ``_target_`` names."""
    module_name, _, name = target.rpartition(".")
    try:
        found = get_object(target)
    except ImportError as error:
        try:
            names = vars(importlib.import_module(module_name))
        except Exception as failed:
            missing = failed.name if isinstance(failed, ModuleNotFoundError) else "."
            if not f"{module_name}.".startswith(f"{missing}."):
                # Something inside of the user's module: not a typo here.
                if mistake := at_build(failed, key):
                    raise mistake from failed
                raise
            hint = f" There is no module {missing}."
        else:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {module_name}.{close[0]}?" if close else ""
        raise UserError(f"{key}._target_: {target} does not exist.{hint}") from error
    if not callable(found):
        raise UserError(f"{key}._target_: {target} is not a class or a function.")
    return found


def check_arguments(key: str, node: Any, called: Any) -> None:
    """Refuse names that a class or a function does not take."""
    try:
        parameters = inspect.signature(called).parameters
    except ValueError:
        return  # written in C
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in node:
        if name not in parameters and name not in HYDRA_KEYS:
            close = difflib.get_close_matches(str(name), parameters, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"It takes {', '.join(parameters)}."
            raise UserError(f"{key}: {node._target_} has no argument {name}. {hint}")


def check_kinds(model: Any, data: Any, callbacks: list[Any], loggers: list[Any]) -> None:
    """Refuse objects that the Trainer could not use.

    Raises:
        UserError: with the key and what it must be.
    """
    wanted: list[tuple[str, list[Any], type]] = [
        ("model", [model], pl.LightningModule),
        ("data", [data], pl.LightningDataModule),
        ("callbacks", callbacks, pl.Callback),
        ("logger", loggers, Logger),
    ]
    for key, objects, kind in wanted:
        for built in objects:
            if not isinstance(built, kind):
                name = f"{type(built).__module__}.{type(built).__qualname__}"
                hint = ""
                if isinstance(built, nn.Module):
                    hint = " A network is an argument of the LightningModule that trains it."
                raise UserError(f"{key}: {name} is not a {kind.__name__}.{hint}")
