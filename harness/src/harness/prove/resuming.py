"""What a run that was killed has lost."""

from pathlib import Path

from harness.checkpoints import lookup
from harness.checkpoints.reading import read
from harness.prove.records import Departure, Records
from harness.runs.equality import STATES, differences


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
        for key in STATES
        if differences(a.get(key), b.get(key))
    ]
