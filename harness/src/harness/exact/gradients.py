"""How far gradients and logged values of a batch are from those of its shares together."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Gradients = dict[str, Tensor]  # by the names of parameters


def difference(expected: Sequence[Gradients], found: Sequence[Gradients]) -> tuple[float, str]:
    """The largest difference of gradients, relative to the largest of its step, and where."""
    if len(expected) != len(found):
        return math.inf, "the number of steps of optimizers"
    worst, where = 0.0, ""
    for one, other in zip(expected, found, strict=True):
        scale = max((float(g.abs().max()) for g in one.values() if g.numel()), default=0.0)
        for name in [name for name, gradient in one.items() if gradient.numel()]:
            far = float((one[name] - other[name]).abs().max()) / (scale or 1e-30)
            if not far <= worst:
                worst, where = far, name
    return worst, where


def tolerance(gradients: Sequence[Tensor], precision: str, noise: float) -> float:
    """What rounding may make of gradients, relative to the largest.

    Args:
        gradients: of a step.
        precision: of the trainer.
        noise: what another order of the samples has made of them. More than rounding could is no
            noise: the step depends on the order.
    """
    kinds = [gradient.dtype for gradient in gradients]
    kinds += [torch.bfloat16] * ("bf16" in precision) + [torch.float16] * (precision[:3] == "16-")
    eps = max(torch.finfo(kind).eps for kind in kinds)
    floor, most = math.sqrt(eps) / 10, min(0.1, 30 * math.sqrt(eps))
    return max(floor, 8 * noise) if noise <= most else floor


def odd_log(
    whole: dict[str, Any], parts: Sequence[dict[str, Any]], sizes: Sequence[int], limit: float
) -> str:
    """The first value of a batch that those of its shares do not give; empty if all do."""
    for name, (value, how, own) in whole.items():
        if not all(name in part for part in parts):
            return name
        values = [part[name][0] for part in parts]
        counts = sizes if own is None else [part[name][2] for part in parts]
        if how in ("max", "min", "sum"):
            combine: Any = {"max": max, "min": min, "sum": sum}[how]
            together = combine(values)
        else:
            total = sum(v * float(n) for v, n in zip(values, counts, strict=True) if n)
            together = total / (float(sum(counts)) or 1.0)
        most = max(abs(value), *map(abs, values))
        if not abs(together - value) <= limit * most and not (math.isnan(value)):
            return name
    return ""
