"""How far two runs are from each other by name, and how far rounding alone takes them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from harness.prove.record import Record

FAR = 30.0  # times as far as the control is no rounding any more


class Difference(NamedTuple):
    """How far a parameter, buffer or logged value is from that of one process."""

    is_equal: bool  # or else rounding does not explain it
    distance: float  # the largest of all steps, as ``distance`` measures it
    step: int  # of the optimizer, the first that is not equal; 0 is before all

    @property
    def rank(self) -> tuple[bool, float]:
        """What is shown first: what differs, then what is farthest."""
        return not self.is_equal, self.distance


class Tolerance(NamedTuple):
    """The distances that rounding may make; all 0 compares by bit."""

    of_weights: float
    of_values: float  # that are logged; torchmetrics counts in single precision
    # Share of what any parameter has moved: Adam makes steps even of a gradient's rounding.
    of_farthest: float = 1e-7


DOUBLE, SINGLE, BY_BIT = Tolerance(1e-13, 2e-6), Tolerance(2e-6, 2e-5), Tolerance(0, 0, 0)


def differences(
    reference: Record,
    other: Record,
    tolerance: Tolerance,
    control: Mapping[str, Difference] | None = None,
    nudge: float = 0.0,
) -> dict[str, Difference]:
    """The largest difference of each name.

    Args:
        reference: of one process.
        other: of another way to run the same.
        tolerance: what counts as rounding.
        control: differences of a run whose initial parameters were moved by rounding.
        nudge: share by which the other's initial parameters were moved, which is no difference.
    """
    found: dict[str, list[Difference]] = {}

    def add(name: str, distance: float, allowed: float, step: int) -> None:
        rounding = FAR * control[name].distance if control and name in control else 0.0
        is_equal = distance <= max(allowed, rounding)
        found.setdefault(name, []).append(Difference(is_equal, distance, step))

    add("number of steps", abs(len(reference.paths) - len(other.paths)), 0, len(other.paths))
    initial: dict[str, Tensor] = {}
    for step, (one, two) in enumerate(zip(reference.weights(), other.weights(), strict=False)):
        initial = initial or one
        farthest = max((distance(one[n], p) for n, p in initial.items() if n in one), default=0.0)
        allowed = max(tolerance.of_weights, tolerance.of_farthest * farthest)
        for name in one.keys() | two.keys():
            both = name in one and name in two
            far = distance(one[name] * (1.0 + nudge), two[name]) if both else math.inf
            add(name, far, allowed, step)
    for name in sorted(reference.values.keys() | other.values.keys()):
        a, b = reference.values.get(name, {}), other.values.get(name, {})
        for step in a.keys() | b.keys():
            one_value, two_value = (torch.tensor(x.get(step, math.inf)) for x in (a, b))
            add(name, distance(one_value, two_value, least=1e-3), tolerance.of_values, step)
    return {name: _worst(each) for name, each in found.items()}


def _worst(each: list[Difference]) -> Difference:
    worst = max(each, key=lambda one: one.rank)
    steps = [one.step for one in each if not one.is_equal]
    return worst._replace(step=min(steps, default=worst.step))


def distance(one: Tensor, two: Tensor, least: float = 1.0) -> float:
    """The largest difference of two tensors' numbers, as a share of the first's.

    Args:
        one: of any shape.
        two: another; of another shape it is infinitely far.
        least: what a smaller number counts as.
    """
    if one.shape != two.shape:
        return math.inf
    kind = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(kind), two.to(kind)
    far = ((a - b).abs() / a.abs().clamp(min=least)).nan_to_num(math.inf, math.inf)
    far = far.where((a != b) & ~(a.isnan() & b.isnan()), 0.0)
    return float(far.max()) if far.numel() else 0.0
