"""Build the bare network from a run's saved config, to hold the weights against it.

Building runs code, and a config may come with a foreign checkpoint. So it can only name classes of
torch.nn, and of packages that the user calls their own, that are `torch.nn.Module`s: nothing else
is imported, and nothing else is called.
"""

import functools
import importlib
import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .names import NETWORKS
from .tensors import CheckpointError

_MAX_CONFIG = 100_000  # characters; a run's config has some 5,000
_MAX_FACTS = 100_000_000  # bytes; a large tokenizer is among them


class Network(NamedTuple):
    """A network on the meta device, where tensors have no memory."""

    module: Any  # a torch.nn.Module
    names: set[str]  # of its tensors, as the state_dict of its LightningModule has them

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise a CheckpointError unless tensors of these names and shapes load strictly."""
        import torch

        try:
            state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
            self.module.load_state_dict(state, strict=True, assign=True)
        except Exception as error:  # a class's own code can fail in any way
            lines = " ".join(str(error).split())[:300]
            raise CheckpointError(f"does not fit the network of config.yaml: {lines}") from error


def network_of(checkpoint: Path, packages: Collection[str]) -> tuple[Network | None, list[str]]:
    """Return the network of the run that saved the checkpoint, or None and perhaps why.

    It is `model.net`, `model.model` or `model.network` of the config.yaml two folders above.
    """
    config = checkpoint.resolve().parent.parent / "config.yaml"
    if not config.is_file():
        return None, []
    try:
        import torch

        model = _read(config)["model"]
        attribute = next((name for name in NETWORKS if name in model), None)
        if attribute is None:
            raise CheckpointError(f"only a model's {', '.join(NETWORKS)} is built")
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            node = _filled(model[attribute], config.with_name("data.json"))
            module = _build(node, ("torch.nn", *packages))
        if not isinstance(module, torch.nn.Module):
            raise CheckpointError(f"its model.{attribute} is not a network")
        return Network(module, {f"{attribute}.{name}" for name in module.state_dict()}), []
    except Exception as error:  # a class's own code can fail in any way
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return None, [f"not held against the network of {config}: {reason}"]


def _read(config: Path) -> Any:
    """Return what a config holds, unless reading it could take for ever."""
    import yaml

    with config.open(encoding="utf-8") as file:
        text = file.read(_MAX_CONFIG + 1)
    if len(text) > _MAX_CONFIG:
        raise CheckpointError("config.yaml is too large for a run's config")
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise CheckpointError("config.yaml holds aliases")  # ten of ten of ten ...
    return yaml.safe_load(text)


def _filled(node: Any, facts: Path) -> Any:
    """Return a node with the settings that its run has taken from the data."""
    text = json.dumps(node)
    if '"from_data.' not in text or not facts.is_file():
        return node
    known = json.loads(facts.read_bytes()) if facts.stat().st_size <= _MAX_FACTS else {}
    for name, value in known.items():
        text = text.replace(f'"from_data.{name}"', json.dumps(value))
    return json.loads(text)


def _build(node: Any, packages: Collection[str]) -> Any:
    """Return a node's value, with a network for each `_target_` in it."""
    if isinstance(node, str) and ("${" in node or node.startswith("from_data.")):
        raise CheckpointError("config.yaml holds interpolations")
    if isinstance(node, list):
        return [_build(value, packages) for value in node]
    if not isinstance(node, dict):
        return node
    values = {_build(name, packages): _build(value, packages) for name, value in node.items()}
    if "_target_" not in values:
        return values
    cls, arguments = _class(values.pop("_target_"), packages), values.pop("_args_", [])
    if values.pop("_partial_", False):
        return functools.partial(cls, *arguments, **values)
    return cls(*arguments, **values)


def _class(target: Any, packages: Collection[str]) -> Any:
    import torch

    allowed = tuple(f"{package}." for package in packages)
    module, _, name = str(target).rpartition(".")
    cls = getattr(importlib.import_module(module), name) if target.startswith(allowed) else None
    is_network = isinstance(cls, type) and issubclass(cls, torch.nn.Module)
    # What another package has defined may only be imported there.
    if not is_network or not f"{cls.__module__}.".startswith(allowed):
        known = " or ".join(packages)
        raise CheckpointError(f"{target} is not a network of {known}; --package adds your own")
    return cls
