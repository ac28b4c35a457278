"""The files of a finished run, and a comparison of two runs."""

import itertools
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from harness.checkpoints.lookup import by_step, link_newest
from harness.checkpoints.reading import read


def leave_at(run_dir: Path, step: int, keeps_results: bool = False) -> None:
    """Make of a finished run one that was stopped after a step."""
    for path in by_step(run_dir / "checkpoints"):
        if int(path.stem.rpartition("_")[2]) > step:
            path.unlink()
    link_newest(by_step(run_dir / "checkpoints")[-1])
    if not keeps_results:
        (run_dir / "results.json").unlink(missing_ok=True)


def contents(run_dir: Path) -> dict[str, Any]:
    """Everything that must be the same: checkpoints, metrics, results and curves."""
    checkpoints = run_dir / "checkpoints"
    found: dict[str, Any] = {path.name: read(path) for path in checkpoints.iterdir()}
    for checkpoint in found.values():  # TensorBoard's files hold times
        checkpoint.get("safe_point", {}).get("logs", {}).pop("events", None)
        # Python may give a new object the id of one that is gone: it is then filled in place, too.
        checkpoint.get("changed_attributes", {}).pop("in_place", None)
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
            if value.metadata.plugin_data.plugin_name in ("", "scalars"):
                number = tensor_util.make_ndarray(value.tensor).item()
                points.append((event.step, value.tag, number))
    return points


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """List the places where two trees of values differ by a bit; a NaN equals a NaN."""
    if type(a) is not type(b):
        return [f"{where}: {type(a)} is not {type(b)}"]
    if isinstance(a, dict):
        places = [f"{where}: {key}" for key in a.keys() ^ b.keys()]
        return places + [d for k in a if k in b for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, (list, tuple, deque)) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{where}[{i}]")]
    if isinstance(a, (np.ndarray, np.generic)):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return [] if same else [where]
    if not isinstance(a, torch.Tensor):
        return [] if a == b or (a != a and b != b) else [f"{where}: {a!r:.60} != {b!r:.60}"]
    a, b = (tensor.to_dense() if tensor.is_sparse else tensor for tensor in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return [f"{where}: {a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}"]
    if bool(((a == b) | ((a != a) & (b != b))).all()):
        return []
    return [f"{where} by at most {float((a.double() - b.double()).abs().max()):.2g}"]


def only(folder: Path) -> Path:
    """The one file or folder in a folder."""
    (child,) = folder.iterdir()
    return child
