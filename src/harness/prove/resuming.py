"""What a run that was killed has lost."""

from pathlib import Path
from typing import Any

import torch

from harness.checkpoints import lookup
from harness.checkpoints.reading import read
from harness.checkpoints.stand_in import StandIn
from harness.prove.records import Departure, Records


def forgotten(whole: Records, resumed: Records) -> list[str]:
    """What had changed before a kill, and was not brought back."""
    starts = resumed.steps("start")
    step = max(starts)
    if step not in whole.steps():
        return []
    before, then, now = whole.initial, whole.steps()[step]["state"], starts[step]["state"]
    return [
        name
        for name, kept in then.items()
        if kept.kind == "hidden"
        and (name not in before or before[name].checksum != kept.checksum)
        and (name not in now or now[name].checksum != kept.checksum)
    ]


def other_states(one: Path, two: Path) -> list[Departure]:
    """What differs in the last checkpoints besides weights."""
    a, b = (read(folder / "checkpoints" / lookup.NEWEST) for folder in (one, two))
    return [
        Departure("state of", key, a["global_step"], float("nan"))
        for key in ("optimizer_states", "lr_schedulers")
        if not _is_same(a.get(key), b.get(key))
    ]


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b or (a != a and b != b) or isinstance(a, StandIn))
