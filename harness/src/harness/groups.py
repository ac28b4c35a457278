"""Groups of parameters with learning rates of their own, for an optimizer."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

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
        lr_factors: by the name of a part, such as ``net.backbone``, the share of ``lr`` that it
            learns with; of parts inside of each other the inner one counts.
        layer_decay: the last layer learns with ``lr``, and each one before it with so many times
            the rate of the next, as in BEiT (Bao et al., ICLR 2022). See ``layers`` for what
            they are.
        decay_norms: whether weight decay holds for biases, the parameters of norms, and others
            of one dimension; ``False`` sets their ``weight_decay`` to 0.

    Returns:
        Groups with ``name``, ``params``, ``lr``, ``lr_factor``, and ``weight_decay`` where it is
        0, in the order of the module's parameters.

    Raises:
        UserError: if a number is out of range, or a part is not there.
    """
    factors = _checked(lr_factors or {})
    named = {bare(name): parameter for name, parameter in module.named_parameters()}
    check_parts("lr_factors", list(factors), named)
    depths, num_layers = {}, 1
    if layer_decay is not None:
        if not _is_number(layer_decay) or not 0 < layer_decay <= 1:
            raise UserError(
                f"layer_decay={layer_decay} must be more than 0 and at most 1; "
                "null is the same rate for all layers."
            )
        found = layers(module)
        num_layers = len(found)
        depths = {name: depth for depth, (_, inside) in enumerate(found) for name in inside}
    owners = {bare(name): type(child).__name__ for name, child in module.named_modules()}
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in named.items():
        part = max((part for part in factors if is_below(name, [part])), key=len, default=None)
        places, factor = [part] if part else [], factors[part] if part else 1.0
        if layer_decay is not None:
            places.append(f"layer_{depths[name]}")
            factor *= layer_decay ** (num_layers - 1 - depths[name])
        place = "/".join(places) or "other"
        settings = {"lr": lr * factor, "lr_factor": factor}
        if not decay_norms and _is_norm_or_bias(name, parameter, owners):
            place += "/no_decay"
            settings["weight_decay"] = 0.0
        # LearningRateMonitor shows the name.
        group = groups.setdefault(place, {"name": place, "params": [], **settings})
        group["params"].append(parameter)
    return list(groups.values())


def layers(module: nn.Module) -> list[tuple[str, list[str]]]:
    """The layers of a module from its input to its output, each with its parameters' names.

    They are its children in the order in which they are registered. A child's own children stand in
    its place where it is a ``Sequential``, ``ModuleList`` or ``ModuleDict``, or where it has more
    than half of all parameters, as a backbone or an encoder has. A norm belongs to the layer before
    it; parameters of a network itself, such as a class token, to its first layer.
    """
    total = sum(_sizes(module).values())
    found: list[tuple[str, list[str]]] = []

    def walk(parent: nn.Module, place: str) -> None:
        own = [f"{place}{name}" for name, _ in parent.named_parameters(recurse=False)]
        first = len(found)
        for name, child in parent.named_children():
            sizes = _sizes(child)
            inside = [f"{place}{name}.{inner}" for inner in sizes]
            is_whole = isinstance(child, CONTAINERS) or 2 * sum(sizes.values()) > total
            if not inside:
                continue
            has_children = any(True for _ in child.children())
            if is_whole and has_children:
                walk(child, f"{place}{name}.")
            elif "Norm" in type(child).__name__ and not has_children and len(found) > first:
                found[-1][1].extend(inside)
            else:
                found.append((f"{place}{name}", inside))
        if len(found) == first:
            found.append((place.rstrip("."), []))
        found[first][1].extend(own)

    walk(module, "")
    known: set[str] = set()
    named = {bare(name) for name, _ in module.named_parameters()}  # shared ones once
    result = []
    for place, inside in found:
        names = [bare(name) for name in inside if bare(name) in named - known]
        known |= {*names}
        if names:
            result.append((bare(place), names))
    return result


def _sizes(module: nn.Module) -> dict[str, int]:
    return {name: 0 if is_lazy(p) else p.numel() for name, p in module.named_parameters()}


def _is_norm_or_bias(name: str, parameter: nn.Parameter, owners: Mapping[str, str]) -> bool:
    owner, _, leaf = name.rpartition(".")
    if leaf.endswith("bias") or "Norm" in owners[owner]:
        return True
    return not is_lazy(parameter) and parameter.ndim <= 1


def _checked(given: Mapping[str, Any]) -> dict[str, float]:
    for part, factor in given.items():
        if not _is_number(factor) or not 0 < factor < math.inf:
            raise UserError(
                f"lr_factors: {part}: {factor} must be a number, more than 0; "
                f"init.freeze=[{part}] does not train it."
            )
    return {str(part): float(factor) for part, factor in given.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
