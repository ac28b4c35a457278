"""Sketches of gradients: at most 1,024 numbers each, which add up and compare like gradients.

In: a gradient on its device. Out: sums of its elements with random signs, on the host. This is the
count sketch of Charikar, Chen and Farach-Colton (ICALP 2002), with one sign per row.

Sketches are linear: the mean of the ranks' sketches is the sketch of their mean gradient. They also
estimate the norm of a difference. So no full gradient is copied, sent or stored.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from harness.parity.snapshot import to_host

MOST_NUMBERS = 1024
Sketches = dict[str, Tensor]  # of an optimizer step's gradients, by name of the parameter
SUM, MEAN, OTHER = "a sum", "a mean over something else than samples", "no mean over samples"


def sketch(gradient: Tensor) -> Tensor:
    """Return the sketch of a gradient on the host, of shape (n,) with n <= ``MOST_NUMBERS``."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    flat = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    flat = flat.detach().reshape(-1)
    if flat.dtype not in (torch.float32, torch.float64):
        flat = flat.float()
    if len(flat) <= MOST_NUMBERS:
        return to_host(flat)
    num_rows = len(flat) // MOST_NUMBERS
    signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], num_rows))
    rows = flat[: num_rows * MOST_NUMBERS].view(num_rows, MOST_NUMBERS)
    sums = signs.to(flat) @ rows  # makes no copy of the gradient
    rest = flat[num_rows * MOST_NUMBERS :]
    sums[: len(rest)] += rest
    return to_host(sums)


def zeros_like(parameter: Tensor) -> Tensor:
    """Return the sketch of a zero gradient."""
    size = parameter.numel() * (2 if parameter.is_complex() else 1)
    dtype = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(min(size, MOST_NUMBERS), dtype=dtype)


def sketch_of(parameter: nn.Parameter) -> Tensor:
    """Return the sketch of a parameter's gradient; None counts as 0."""
    return zeros_like(parameter) if parameter.grad is None else sketch(parameter.grad)


def record_sketch(parameter: nn.Parameter, name: str, sketches: Sketches) -> None:
    """Add a parameter's gradient to its sketch, and free the gradient."""
    if parameter.grad is not None or name not in sketches:
        new = sketch_of(parameter)
        sketches[name] = new + sketches[name].to(new) if name in sketches else new
        parameter.grad = None


def mean_of(parts: Sequence[Sketches], factor: float = 1.0) -> Sketches:
    """Return the mean of the sketches of all ranks or accumulated batches, times a factor."""
    names = parts[0].keys()
    return {n: torch.stack([part[n] for part in parts]).mean(0) * factor for n in names}


def difference(
    expected: Sequence[Sketches], actual: Sequence[Sketches], parts: Iterable[Sketches] = ()
) -> tuple[float, str]:
    """Return the largest difference between the gradients of steps, and its parameter's name.

    The difference is relative to the largest norm of a gradient in the step. The gradients of
    ``parts`` count as well, because their mean may almost vanish.
    """
    if len(expected) != len(actual):
        return math.inf, "the number of steps of optimizers"
    largest, parameter, parts = 0.0, "", list(parts)
    for one, other in zip(expected, actual, strict=True):
        gradients = [g for sketches in (one, *parts) for g in sketches.values()]
        scale = max((float(gradient.norm()) for gradient in gradients), default=0.0)
        for name in one.keys() | other.keys():
            if name not in one or name not in other:
                return math.inf, name
            norm = (one[name] - other[name]).norm().nan_to_num(nan=math.inf)
            if (relative := float(norm) / (scale or 1e-30)) > largest:
                largest, parameter = relative, name
    return largest, parameter


def is_finite(steps: Iterable[Sketches]) -> bool:
    """Return whether all gradients are finite."""
    return all(bool(g.isfinite().all()) for sketches in steps for g in sketches.values())


def tolerance(eps: float, noise: float = 0.0) -> float:
    """Return the largest relative difference of gradients that counts as rounding.

    ``noise`` is the difference of the gradients between two orders of the samples. If ``noise``
    exceeds rounding errors, the step depends on the order, and ``noise`` is ignored.
    """
    floor, most = math.sqrt(eps) / 10, min(0.1, 30 * math.sqrt(eps))
    return max(floor, 8 * noise) if noise <= most else floor


def kind_of(whole: Sketches, parts: Sequence[Sketches], limit: float) -> str:
    """Return ``SUM``, ``MEAN`` or ``OTHER``: how the parts' gradients form the whole gradient.

    Args:
        whole: the gradient of all samples.
        parts: the gradient of each part alone.
        limit: the largest relative difference from rounding.
    """
    target = torch.cat([g.double() for g in whole.values()])
    columns = torch.stack([torch.cat([p[n].double() for n in whole]) for p in parts], 1)
    scale = float(columns.norm(dim=0).max()) or 1e-30
    if float((columns.sum(1) - target).norm()) <= 10 * limit * scale:
        return SUM
    if len(target) < 2 * len(parts):
        return OTHER
    factors = nn.functional.relu(torch.linalg.lstsq(columns, target[:, None]).solution)
    rest = float((columns @ factors - target[:, None]).norm())
    is_mean = abs(float(factors.sum()) - 1) <= max(1e-3, 100 * limit)
    return MEAN if is_mean and rest <= 10 * limit * scale else OTHER
