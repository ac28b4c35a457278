"""Build the bare network from a run's saved config, to hold the weights against it.

Building runs code, so the config may only name networks: classes of this package or of torch.nn
that are `torch.nn.Module`s. A config that came with a foreign checkpoint can start nothing else.
"""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import Entry
from .tensors import CheckpointError

if TYPE_CHECKING:
    import torch

_PREFIX = "net"  # where the LightningModules of this project hold their network
_MAX_CONFIG = 100_000  # characters; a run's config has some 5,000
_OURS = (f"{__package__.partition('.')[0]}.", "torch.nn.")


class UnbuildableError(Exception):
    """The network cannot be built here; the message says why."""


def network_of(checkpoint: Path) -> "tuple[torch.nn.Module | None, list[str]]":
    """Return the network of the run that saved the checkpoint, or None and perhaps why."""
    config = checkpoint.resolve().parent.parent / "config.yaml"
    if not config.is_file():
        return None, []
    try:
        return build_network(config), []
    except UnbuildableError as error:
        return None, [f"not held against the network of {config}: {error}"]


def build_network(config: Path) -> "torch.nn.Module":
    """Build `model.net` of a config on the meta device, where tensors have no memory.

    Raises:
        UnbuildableError: the config has no such entry, names something that is not a network,
            or its class is not installed or does not accept the arguments.
    """
    import torch
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    try:
        saved: Any = OmegaConf.to_container(OmegaConf.load(io.StringIO(_text(config))))
        node = saved["model"]["net"]
        _check_targets(node)
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            network = instantiate(node, _convert_="all")
    except Exception as error:  # user code, which can fail in any way
        cause = error.__cause__ or error  # hydra wraps what a class raises
        reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise UnbuildableError(reason) from error
    if not isinstance(network, torch.nn.Module):
        raise UnbuildableError("model.net is not a torch.nn.Module")
    return network


def _text(config: Path) -> str:
    """Return the config's text unless reading it could take for ever."""
    import yaml

    with config.open(encoding="utf-8") as file:
        text = file.read(_MAX_CONFIG + 1)
    if len(text) > _MAX_CONFIG:
        raise UnbuildableError("config.yaml is too large for a run's config")
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise UnbuildableError("config.yaml holds aliases")  # ten of ten of ten ...
    return text


def _check_targets(node: Any) -> None:
    """Raise unless all that instantiating `node` would call is a network's class."""
    import torch
    from hydra.utils import get_class

    if isinstance(node, str) and "${" in node:
        raise UnbuildableError("config.yaml holds interpolations")
    if isinstance(node, list):
        for value in node:
            _check_targets(value)
    if isinstance(node, dict):
        for value in [*node, *node.values()]:
            _check_targets(value)
        if (target := node.get("_target_")) is not None:
            allowed = isinstance(target, str) and target.startswith(_OURS)
            cls = get_class(target) if allowed else object
            if not (issubclass(cls, torch.nn.Module) and f"{cls.__module__}.".startswith(_OURS)):
                raise UnbuildableError(f"{target} is not a network of this project or of torch.nn")


def names_in_module(network: "torch.nn.Module") -> set[str]:
    """Return the names of the network's tensors, as they are in its LightningModule."""
    return {f"{_PREFIX}.{name}" for name in network.state_dict()}


def meta_state(entries: Mapping[str, Entry]) -> "dict[str, torch.Tensor]":
    """Return tensors of these shapes without values."""
    import torch

    return {name: torch.empty(entry.shape, device="meta") for name, entry in entries.items()}


def mapped_state(path: Path) -> "dict[str, torch.Tensor]":
    """Load a .pt file as its user will, but leave the values on the disk."""
    import torch

    state: dict[str, torch.Tensor] = torch.load(path, mmap=True, weights_only=True)
    return state


def load_strictly(network: "torch.nn.Module", state: "Mapping[str, torch.Tensor]") -> None:
    """Load `state` into the network, by reference.

    Raises:
        CheckpointError: a name or a shape differs.
    """
    try:
        network.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise CheckpointError(f"does not fit the network of config.yaml: {lines[:300]}") from error
