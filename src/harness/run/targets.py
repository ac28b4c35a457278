"""Whether what a config names exists, and takes the arguments that it gets."""

import difflib
import importlib
import inspect
from typing import Any

from hydra.utils import get_object
from omegaconf import OmegaConf

from harness.errors import UserError

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
        except ModuleNotFoundError as missing:
            if not f"{module_name}.".startswith(f"{missing.name}."):
                raise missing from None  # an import inside of the user's module: not a typo here
            hint = f" There is no module {missing.name}."
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
