"""Where two runs, or two trees of saved values, differ by a bit."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.checkpoints.reading import read
from harness.checkpoints.stand_in import StandIn
from harness.runs import reading

STATES = ("optimizer_states", "lr_schedulers")
WEIGHTS = ("best.ckpt", "last.ckpt")
TIMINGS = "throughput/"  # no two runs take the same time


def reached(folder: Path) -> dict[str, Any]:
    """What two runs are compared by: weights, states of optimizers, metrics and results."""
    found: dict[str, Any] = {}
    for name in WEIGHTS:
        path = folder / "checkpoints" / name
        saved = read(path) if path.is_file() else {}
        found[name] = {key: saved.get(key) for key in ("state_dict", "global_step", *STATES)}
    table, results = reading.read_table(folder / reading.METRICS), reading.read(folder).results
    found[reading.METRICS] = {k: table[k].to_list() for k in table.columns if TIMINGS not in k}
    found[reading.RESULTS] = {k: v for k, v in results.items() if TIMINGS not in k}
    return found


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two trees of values differ by a bit."""
    a, b = unmarked(a), unmarked(b)
    if type(a) is not type(b):
        return [f"{where}: {type(a)} is not {type(b)}"]
    if isinstance(a, StandIn):
        return [] if repr(a) == repr(b) else [f"{where}: {a!r} != {b!r}"]
    if isinstance(a, (np.ndarray, np.generic)):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return [] if same else [where]
    if isinstance(a, torch.Tensor):
        return _of_tensors(a, b, where)
    if isinstance(a, dict):
        found = [f"{where}: {sorted(a.keys() ^ b.keys(), key=str)}"] if a.keys() != b.keys() else []
        for key in [key for key in a if key in b]:
            found += differences(a[key], b[key], f"{where}/{key}")
        return found
    if isinstance(a, (list, tuple, deque)) and len(a) == len(b):
        pairs = zip(a, b, strict=True)
        return [d for i, (x, y) in enumerate(pairs) for d in differences(x, y, f"{where}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {a!r:.60} != {b!r:.60}"]


def _of_tensors(a: torch.Tensor, b: torch.Tensor, where: str) -> list[str]:
    a, b = (x.to_dense() if x.is_sparse else x for x in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return [f"{where}: {a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}"]
    if bool(((a == b) | ((a != a) & (b != b))).all()):  # a NaN equals a NaN
        return []
    return [f"{where} by at most {float((a.double() - b.double()).abs().max()):.2g}"]


def unmarked(node: Any) -> Any:
    """Without the mark of an object that was there when training began.

    It goes by ids, which Python may give again to one that was made later.
    """
    return node["of"] if isinstance(node, dict) and node.get("#") == "same" else node
