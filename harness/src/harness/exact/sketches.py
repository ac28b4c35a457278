"""Sketches of gradients: few numbers, on the host, that add up and compare as gradients do.

In: a gradient on its device. Out: sums of its elements with random signs, at most ``MOST_NUMBERS``
of each tensor (the count sketch of Charikar, Chen and Farach-Colton, ICALP 2002, with a sign per
row). It is linear: the mean of ranks' sketches is the sketch of their mean gradient, and the norm
of a difference is kept. So nothing as large as a gradient is copied, sent or kept.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from harness.exact.snapshot import to_host

MOST_NUMBERS = 1024
Sketches = dict[str, Tensor]  # of the gradients of an optimizer's step, by names of parameters
SUM, MEAN, OTHER = "a sum", "a mean over something else than samples", "no mean over samples"


def sketch(gradient: Tensor) -> Tensor:
    """Return the sketch of a gradient, (at most ``MOST_NUMBERS``,), on the host."""
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
    sums = signs.to(flat) @ rows  # without a copy of the gradient
    rest = flat[num_rows * MOST_NUMBERS :]
    sums[: len(rest)] += rest
    return to_host(sums)


def zeros_like(parameter: Tensor) -> Tensor:
    """Return the sketch of a gradient that is 0."""
    size = parameter.numel() * (2 if parameter.is_complex() else 1)
    dtype = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(min(size, MOST_NUMBERS), dtype=dtype)


def sketch_of(parameter: nn.Parameter) -> Tensor:
    """Return the sketch of a parameter's gradient, which is 0 if there is none."""
    return zeros_like(parameter) if parameter.grad is None else sketch(parameter.grad)


def take(parameter: nn.Parameter, name: str, noted: Sketches) -> None:
    """Add a parameter's gradient to its sketch, and free it."""
    if parameter.grad is not None or name not in noted:
        now = sketch_of(parameter)
        noted[name] = now + noted[name].to(now) if name in noted else now
        parameter.grad = None


def mean_of(shares: Sequence[Sketches], factor: float = 1.0) -> Sketches:
    """Return the mean over the ranks or batches that share a step, times a factor."""
    names = shares[0].keys()
    return {n: torch.stack([share[n] for share in shares]).mean(0) * factor for n in names}


def difference(
    one: Sequence[Sketches], other: Sequence[Sketches], parts: Iterable[Sketches] = ()
) -> tuple[float, str]:
    """Return the largest difference between the gradients of steps, and of which parameter.

    It is relative to the largest gradient of the step, or of one of its `parts`: a mean that has
    almost vanished is no measure.
    """
    if len(one) != len(other):
        return math.inf, "the number of steps of optimizers"
    worst, where, parts = 0.0, "", list(parts)
    for mine, theirs in zip(one, other, strict=True):
        every = [g for sketches in (mine, *parts) for g in sketches.values()]
        scale = max((float(gradient.norm()) for gradient in every), default=0.0)
        for name in mine.keys() | theirs.keys():
            if name not in mine or name not in theirs:
                return math.inf, name
            apart = (mine[name] - theirs[name]).norm().nan_to_num(nan=math.inf)
            if (far := float(apart) / (scale or 1e-30)) > worst:
                worst, where = far, name
    return worst, where


def is_finite(steps: Iterable[Sketches]) -> bool:
    """Return whether all gradients are numbers."""
    return all(bool(g.isfinite().all()) for sketches in steps for g in sketches.values())


def tolerance(eps: float, noise: float = 0.0) -> float:
    """Return the difference that rounding may make, relative to the largest gradient.

    ``noise`` is the difference that another order of the samples makes. If it is more than rounding
    explains, the step depends on the order, and ``noise`` is ignored.
    """
    floor, most = math.sqrt(eps) / 10, min(0.1, 30 * math.sqrt(eps))
    return max(floor, 8 * noise) if noise <= most else floor


def kind_of(whole: Sketches, parts: Sequence[Sketches], limit: float) -> str:
    """Say how the gradient of whole samples comes from those of their parts.

    Args:
        whole: of all samples.
        parts: of each part as if it were alone.
        limit: the relative difference that rounding makes.
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
