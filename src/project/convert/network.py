"""Build the bare network from a run's saved config, to hold the weights against it.

Building runs code, so the config may only name networks: classes of this package or of torch.nn
that are `torch.nn.Module`s. A config that came with a foreign checkpoint can start nothing else.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tensors import CheckpointError

if TYPE_CHECKING:
    import torch

PREFIX = "net"  # where the LightningModules of this project hold their network
_OURS = (f"{__package__.partition('.')[0]}.", "torch.nn.")


class UnbuildableError(Exception):
    """The network cannot be built here; the message says why."""


def find_config(checkpoint: Path) -> Path | None:
    """Return the config that the run of this checkpoint saved, two folders above it."""
    config = checkpoint.resolve().parent.parent / "config.yaml"
    return config if config.is_file() else None


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
        saved: Any = OmegaConf.to_container(OmegaConf.load(config))
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


def load_strictly(network: "torch.nn.Module", state: dict[str, Any]) -> None:
    """Load `state` into the network, by reference.

    Raises:
        CheckpointError: a name or a shape differs.
    """
    try:
        network.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise CheckpointError(f"does not fit the network of config.yaml: {lines[:300]}") from error
