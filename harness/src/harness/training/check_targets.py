"""Check that each ``_target_`` exists, takes its arguments, and builds the right kind of object.

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
    """Check every ``_target_`` of a config and its arguments, before any target is called.

    Raises:
        UserError: a target does not exist (see ``import_targets``), or lacks an argument. The
            message names the key and the most similar argument.
    """
    for key, node, function in import_targets(cfg):
        target = node["_target_"]
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:
            continue  # a function in C has no signature
        for name in parameters.keys() & node.keys():
            annotation, value = parameters[name].annotation, node[name]
            is_text = isinstance(value, str) and not value.startswith(PREFIX)
            if is_text and {*(get_args(annotation) or (annotation,))} <= NUMBERS:
                raise UserError(
                    f"{key}.{name}={value} is text, but {target} takes a number.\n"
                    f"Type {key}.{name}=<number>."
                )
        has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        names = [] if has_kwargs else [*map(str, node)]
        unknown = [name for name in names if name not in {*parameters, *HYDRA_KEYS}]
        if key in ("model", "data") and len(unknown) > 1:  # an experiment has named another class
            raise UserError(
                f"{key}: {target} has no arguments {', '.join(unknown)}.\n"
                f"If they are of the default {key}, add `- override /{key}: null` to the defaults "
                "of the experiment."
            )
        for name in unknown:
            hint = suggest(name, parameters) or f" It takes {', '.join(parameters)}."
            raise UserError(f"{key}: {target} has no argument {name}.{hint}")


def check_kinds(model: Any, data: Any, callbacks: list[Any], loggers: list[Any]) -> None:
    """Raise a ``UserError`` if the Trainer cannot use an object; ``data`` may be ``None``."""
    built: list[tuple[str, Any, type]] = [("model", model, pl.LightningModule)]
    built += [("data", data, pl.LightningDataModule)] if data is not None else []
    built += [("callbacks", callback, pl.Callback) for callback in callbacks]
    built += [("logger", logger, Logger) for logger in loggers]
    for key, value, base in built:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, (BatchSizeFinder, LearningRateFinder)):
            raise UserError(
                f"{key}: {name} trains first and then resets the model, which no run supports.\n"
                "Use pytorch_lightning.tuner.Tuner in a notebook, or try values: -m <key>=<a>,<b>"
            )
        if not isinstance(value, base):
            hint = ""
            if any(c.__module__.startswith("lightning.pytorch") for c in type(value).__mro__):
                hint = " lightning.pytorch was imported before harness. Import harness first."
            elif isinstance(value, nn.Module):
                hint = " Pass the network as an argument of a LightningModule that trains it."
            raise UserError(f"{key}: {name} is not a {base.__name__}.{hint}")
    if data is not None and not hasattr(data, "prepare_data_per_node"):
        raise UserError(f"data: {type(data).__name__}.__init__ must call super().__init__() first.")
    for key, owner in (("model", model), ("data", data)):
        name = type(owner).__name__
        for attribute, value in vars(owner).items() if owner is not None else ():
            if attribute.endswith("_dataloader") and not callable(value):
                raise UserError(
                    f"{key}: {name}.__init__ sets self.{attribute}, which hides the method.\n"
                    f"Write: def {attribute}(self): return DataLoader(...)"
                )
