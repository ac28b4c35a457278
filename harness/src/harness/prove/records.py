"""What the runs have recorded, and where two of them depart."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.prove.recording import Kept


@dataclass
class Records:
    """What each process of a run has recorded: by rank, then by the name of the record."""

    ranks: list[dict[str, dict[str, Any]]]
    facts: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Records":
        """Read a run's folder ``prove``."""
        ranks = []
        for i in range(len(list(folder.glob("rank_*")))):
            files = sorted((folder / f"rank_{i}").glob("*.pt"))
            # Written by this command's own runs.
            ranks.append({path.stem: torch.load(path, weights_only=False) for path in files})
        path = folder / "rank_0" / "facts.json"
        return cls(ranks, json.loads(path.read_text()) if path.exists() else {})

    def steps(self, kind: str = "step") -> dict[int, dict[str, Any]]:
        """The first process's records of a kind by step: ``start``, ``step``, ``val``, ``test``."""
        names = [name.rpartition("_") for name in self.ranks[0]]
        found = sorted(int(step) for k, _, step in names if k == kind)
        return {step: self.ranks[0][f"{kind}_{step}"] for step in found}

    def evaluated(self) -> dict[tuple[str, int], list[dict[str, Any]]]:
        """The evaluations, each with the records of all processes."""
        return {
            (kind, step): [
                rank[f"{kind}_{step}"] for rank in self.ranks if f"{kind}_{step}" in rank
            ]
            for kind in ("val", "test")
            for step in self.steps(kind)
        }

    @property
    def initial(self) -> dict[str, Kept]:
        """The tensors before the first step."""
        starts = self.steps("start")
        state: dict[str, Kept] = starts[min(starts)]["state"]
        return state


@dataclass(frozen=True)
class Tolerance:
    """What rounding may make of a value.

    Args:
        of_values: share of a weight, or of 1 where it is smaller.
        of_movement: share of how far a weight has moved.
        of_farthest: share of how far any weight has moved: Adam turns the rounding of a gradient
            that is 0, as that of a bias before BatchNorm, into some 1e-9 of a step.
        of_metrics: share of a metric; those of torchmetrics are counted in single precision.
        allowed: how far each tensor departs by rounding alone, where that was measured.
    """

    of_values: float = 1e-13
    of_movement: float = 1e-8
    of_farthest: float = 1e-7
    of_metrics: float = 2e-6
    allowed: dict[str, float] = field(default_factory=dict)

    def weight(self, name: str, value: Tensor, moved: float, farthest: float) -> float:
        """The largest difference of a tensor that counts as none."""
        by_movement = max(self.of_movement * moved, self.of_farthest * farthest)
        bound = max(self.of_values * max(1.0, _largest(value)), by_movement)
        return max(bound, 30 * self.allowed.get(name, 0.0))

    def metric(self, name: str, value: float) -> float:
        """The same for a metric."""
        return max(self.of_metrics * max(abs(value), 1e-3), 30 * self.allowed.get(name, 0.0))


DOUBLE = Tolerance()
SINGLE = Tolerance(of_values=2e-6, of_movement=3e-3, of_farthest=0.0, of_metrics=1e-4)


@dataclass(frozen=True)
class Departure:
    """Where something is first another than in the reference."""

    kind: str  # parameter, buffer, hidden, metric
    name: str
    step: int
    distance: float
    others: int = 0  # of its kind at the same step
    value: float = 0.0  # of a metric, in the reference
    found: float = 0.0  # and here

    def __str__(self) -> str:
        more = f" and {self.others} more" if self.others else ""
        if self.kind == "steps":
            return f"{self.found:.0f} steps instead of {self.value:.0f}"
        if self.kind == "metric":
            values = f"{self.found:.6g} instead of {self.value:.6g}"
            return f"{self.name}{more} is {values} at step {self.step}"
        return f"{self.kind} {self.name}{more}, first at step {self.step}, by {self.distance:.1e}"


def departures(
    reference: Records, other: Records, tolerance: Tolerance, by_bit: bool = False
) -> list[Departure]:
    """The first departure of each kind."""
    found: list[Departure] = []
    initial, here = reference.initial, other.steps()
    for step, record in reference.steps().items():
        if step not in here:
            continue
        far: dict[str, list[tuple[float, str, float]]] = {}
        moved = {
            name: difference(kept.values, initial.get(name, kept).values)
            for name, kept in record["state"].items()
        }
        farthest = max(v for n, v in moved.items() if record["state"][n].kind == "parameter")
        for name, one in record["state"].items():
            two = here[step]["state"].get(name)
            distance = math.inf if two is None else difference(one.values, two.values)
            bound = tolerance.weight(name, one.values, moved[name], farthest)
            is_other = two is None or one.checksum != two.checksum if by_bit else distance > bound
            if is_other:
                far.setdefault(one.kind, []).append((distance / (bound or 1), name, distance))
        for kind in far.keys() - {departure.kind for departure in found}:
            _, name, distance = max(far[kind])
            found.append(Departure(kind, name, step, distance, len(far[kind]) - 1))
        if "parameter" in far:
            break
    last, last_here = max(reference.steps(), default=0), max(here, default=0)
    if last != last_here:
        found.append(Departure("steps", "", 0, 0.0, value=last, found=last_here))
    return found + _of_metrics(reference, other, tolerance, by_bit)


def _of_metrics(
    reference: Records, other: Records, tolerance: Tolerance, by_bit: bool
) -> list[Departure]:
    logged = reference.facts.get("logged", {})
    elsewhere = other.evaluated()
    for (kind, step), ranks in sorted(reference.evaluated().items(), key=lambda item: item[0][1]):
        far = []
        for name, value in ranks[0]["metrics"].items():
            if not is_evaluated(name, logged):
                continue
            for record in elsewhere.get((kind, step), ()):
                found = record["metrics"].get(name, math.nan)
                bound = 0.0 if by_bit else tolerance.metric(name, value)
                if not (abs(found - value) <= bound or (value != value and found != found)):
                    far.append((abs(found - value), name, value, found))
        if far:
            distance, name, value, here = max(far, key=lambda f: f[0] if f[0] == f[0] else math.inf)
            others = len({f[1] for f in far}) - 1
            return [Departure("metric", name, step, distance, others, value, here)]
    return []


def is_evaluated(name: str, logged: dict[str, Any]) -> bool:
    """Whether a metric is one of an evaluation; what a training step logs is its process's."""
    plain = name.partition("/dataloader_idx_")[0]
    return "evaluation" in logged.get(plain, {"stages": []})["stages"]


def distances(reference: Records, other: Records) -> dict[str, float]:
    """How far each tensor and metric of an evaluation ever is from the reference."""
    found: dict[str, float] = {}
    here = other.steps()
    for step, record in reference.steps().items():
        for name, one in record["state"].items() if step in here else ():
            if one.kind == "parameter" and name in here[step]["state"]:
                far = difference(one.values, here[step]["state"][name].values)
                found[name] = max(found.get(name, 0.0), far)
    elsewhere = other.evaluated()
    for key, ranks in reference.evaluated().items():
        for name, value in ranks[0]["metrics"].items() if key in elsewhere else ():
            far = abs(elsewhere[key][0]["metrics"].get(name, math.nan) - value)
            if is_evaluated(name, reference.facts.get("logged", {})) and far == far:
                found[name] = max(found.get(name, 0.0), far)
    return found


def difference(one: Tensor, two: Tensor) -> float:
    """The largest difference of two tensors' numbers; infinite where they cannot be compared."""
    if one.shape != two.shape:
        return math.inf
    if one.numel() == 0:
        return 0.0
    kind = torch.complex128 if one.is_complex() or two.is_complex() else torch.float64
    a, b = one.to(kind), two.to(kind)
    same = (a == b) | (a.isnan() & b.isnan())
    far = torch.where(same, torch.zeros_like(a), a - b).abs().max()
    return math.inf if far.isnan() else float(far)


def _largest(value: Tensor) -> float:
    numbers = value.abs().to(torch.float64) if value.numel() else value.new_zeros(1)
    return float(numbers.nan_to_num(0.0, 0.0, 0.0).max())
