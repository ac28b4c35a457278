"""What a run has left behind, and whether two runs have left the same."""

import itertools
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util


def contents(run_dir: Path) -> dict[str, Any]:
    """Everything that must be the same: checkpoints, metrics, results and curves."""
    checkpoints = run_dir / "checkpoints"
    found: dict[str, Any] = {
        path.name: torch.load(path, weights_only=True) for path in checkpoints.iterdir()
    }
    for name in ("metrics.csv", "results.json"):
        found[name] = (run_dir / name).read_text() if (run_dir / name).exists() else None
    found["tensorboard"] = curves(run_dir / "tensorboard")
    return found


def curves(folder: Path) -> list[tuple[int, str, Any]]:
    """Every value in the files, read as they are: nothing is purged."""
    found = [list(EventFileLoader(str(path)).Load()) for path in folder.glob("events*")]
    # A file's name has the second in which it was made and a process id: of two in one second
    # the names tell no order. The first event has the time with all its digits.
    files = sorted((events for events in found if events), key=lambda e: e[0].wall_time)
    points = []
    for event in itertools.chain(*files):
        for value in event.summary.value:
            is_timing = value.tag.startswith("throughput/")  # no two runs take the same time
            if value.metadata.plugin_data.plugin_name in ("", "scalars") and not is_timing:
                number = tensor_util.make_ndarray(value.tensor).item()
                points.append((event.step, value.tag, number))
    return points


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two trees of plain values and tensors differ by a bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same or (a.isnan().all() and b.isnan().all()) else [where]
    if isinstance(a, dict) and isinstance(b, dict):
        found = [f"{where}: {sorted(a.keys() ^ b.keys(), key=str)}"] if a.keys() != b.keys() else []
        for key in a.keys() & b.keys():
            found += differences(a[key], b[key], f"{where}/{key}")
        return found
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = zip(a, b, strict=True)
        return [d for i, (x, y) in enumerate(pairs) for d in differences(x, y, f"{where}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {a!r:.60} != {b!r:.60}"]
