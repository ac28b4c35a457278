"""Groups of parameters with learning rates of their own, for an optimizer."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from harness.errors import UserError
from harness.init.parts import bare, check_parts
from harness.names import is_below

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def parameter_groups(
    module: nn.Module,
    lr: float,
    lr_factors: Mapping[str, float] | None = None,
    layer_decay: float | None = None,
    decay_norms: bool = True,
) -> list[dict[str, Any]]:
    """Split a module's parameters into groups, as a ``torch.optim.Optimizer`` takes them.

    ``AdamW(harness.parameter_groups(self, lr=1e-3, layer_decay=0.75), lr=1e-3)`` in any
    ``configure_optimizers``. Frozen parameters are in them too: they may be trained later.

    Args:
        module: usually the LightningModule; names of parts begin below it.
        lr: learning rate of what has no factor.
        lr_factors: shares of ``lr`` by the names of parts, such as ``net.backbone``; of parts
            inside of each other the inner one counts.
        layer_decay: the last of the ``layers`` learns with ``lr``, and each one before it with so
            many times the rate of the next, as in BEiT (Bao et al., ICLR 2022).
        decay_norms: ``False`` sets the ``weight_decay`` of biases, norms and other vectors to 0.

    Raises:
        UserError: if a number is out of range, or a part is not there.
    """
    factors = lr_factors or {}
    check_parts("lr_factors", factors, [bare(name) for name, _ in module.named_parameters()])
    for part in factors:
        if not factors[part] > 0:
            raise UserError(f"lr_factors.{part} must be more than 0; see init.freeze=[{part}].")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise UserError(f"layer_decay={layer_decay} must be more than 0 and at most 1, or null.")
    depths = {} if layer_decay is None else layers(module)
    groups: dict[str, dict[str, Any]] = {}
    for full_name, parameter in module.named_parameters():
        name, places, share, settings = bare(full_name), [], 1.0, {}
        if parts := [part for part in factors if is_below(name, [part])]:
            places.append(max(parts, key=len))
            share = factors[places[0]]
        if layer_decay is not None:
            places.append(f"layer_{depths[name]}")
            share *= layer_decay ** (max(depths.values()) - depths[name])
        owner = module.get_submodule(full_name.rpartition(".")[0])
        is_norm_or_bias = name.endswith("bias") or "Norm" in type(owner).__name__
        if not decay_norms and (is_norm_or_bias or parameter.ndim <= 1):
            settings["weight_decay"] = 0.0
        place = "/".join([*places, *(["no_decay"] if settings else [])])
        # LearningRateMonitor shows the name.
        group = {"name": place or "other", "params": [], "lr": lr * share, "lr_factor": share}
        groups.setdefault(place, group | settings)["params"].append(parameter)
    return list(groups.values())


def layers(module: nn.Module) -> dict[str, int]:
    """Return each parameter's layer, counted from the input, by the parameters' names.

    Layers are the module's children in the order in which they are registered. A child's own
    children stand in its place where it is a ``Sequential``, ``ModuleList`` or ``ModuleDict``, or
    has more than half of all parameters, as a backbone or an encoder has. A norm belongs to the
    layer before it; parameters of a network itself, such as a class token, to its first layer.
    """
    total = sum(parameter.numel() for parameter in module.parameters())
    found: list[list[str]] = []

    def walk(parent: nn.Module, place: str) -> None:
        first = len(found)
        for name, child in parent.named_children():
            inside = [f"{place}{name}.{inner}" for inner, _ in child.named_parameters()]
            num_inside = sum(parameter.numel() for parameter in child.parameters())
            is_leaf = not any(True for _ in child.children())
            if not is_leaf and (isinstance(child, CONTAINERS) or 2 * num_inside > total):
                walk(child, f"{place}{name}.")
            elif is_leaf and "Norm" in type(child).__name__ and len(found) > first:
                found[-1].extend(inside)
            elif inside:
                found.append(inside)
        if len(found) == first:
            found.append([])
        found[first].extend(f"{place}{name}" for name, _ in parent.named_parameters(recurse=False))

    walk(module, "")
    depths: dict[str, int] = {}
    named = {bare(name) for name, _ in module.named_parameters()}  # shared ones have one name
    for names in found:
        if new := ({*map(bare, names)} & named) - depths.keys():
            depths |= dict.fromkeys(new, len({*depths.values()}))
    return depths
