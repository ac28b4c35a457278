"""Whether two runs have come to the same, by bit; else where they part and how far."""

import csv
import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from harness.checkpoints.reading import read
from harness.checkpoints.stand_in import StandIn
from harness.runs.reading import METRICS, RESULTS

CHECKPOINTS = ("best.ckpt", "last.ckpt")
STATES = ("optimizer_states", "lr_schedulers")
TIMINGS = "throughput/"  # no two runs take the same time


@dataclass(frozen=True)
class Compared:
    """One file of two runs.

    Attributes:
        name: of the file.
        said: what was found.
        is_equal: by bit.
    """

    name: str
    said: str
    is_equal: bool


def compare(run: Path, again: Path) -> list[Compared]:
    """Compare weights, metrics and results; what neither run has is left out."""
    found = []
    readers = {f"checkpoints/{name}": _weights for name in CHECKPOINTS}
    readers |= {METRICS: _metrics, RESULTS: _results}
    for name, reader in readers.items():
        paths = run / name, again / name
        there = [path.is_file() for path in paths]
        if not all(there):
            if any(there):
                which = "the run" if there[1] else "the run that was made again"
                found.append(Compared(name, f"{which} has none", False))
            continue
        try:
            said, is_equal = reader(*paths)
        except (OSError, ValueError, KeyError, RuntimeError, UnpicklingError) as error:
            said, is_equal = f"cannot be read: {error}", False
        found.append(Compared(name, said, is_equal))
    if not found:
        found.append(Compared("results", "neither run has weights, metrics or results", False))
    return found


def _weights(one: Path, other: Path) -> tuple[str, bool]:
    before, now = read(one), read(other)
    if unequal := differences(before["state_dict"], now["state_dict"]):
        return f"{_largest(before['state_dict'], now['state_dict'])} ({len(unequal)} differ)", False
    if before["global_step"] != now["global_step"]:
        return f"of step {before['global_step']} and {now['global_step']}", False
    for name in STATES:
        if unequal := differences(before.get(name), now.get(name), name):
            return f"equal weights, and other states of optimizers: {unequal[0]}", False
    return f"{len(before['state_dict'])} tensors, and the optimizers' states", True


def _largest(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The largest difference of two sets of weights, and the tensor that has it."""
    if before.keys() != now.keys():
        return f"other tensors: {', '.join(sorted(before.keys() ^ now.keys())[:3])}"
    far = {}
    for name, a in before.items():
        b = now[name]
        if a.shape != b.shape:
            return f"{name} has the shape {tuple(a.shape)} and {tuple(b.shape)}"
        if a.numel() and not torch.equal(a, b):
            far[name] = float((a.double() - b.double()).abs().max())
    name = max(far, key=lambda key: math.inf if math.isnan(far[key]) else far[key], default="")
    return f"differ by at most {far[name]:.2g}, in {name}" if name else "differ in their types"


def _metrics(one: Path, other: Path) -> tuple[str, bool]:
    before, now = ([*_rows(path)] for path in (one, other))
    first, far = "", 0.0
    for row, its in zip_longest(before, now):
        if row is None or its is None:
            first = first or f"{len(before)} rows, and {len(now)}"
            break
        for name in {**row, **its}:
            a, b = row.get(name, ""), its.get(name, "")
            if a != b:
                first = first or f"first at step {row.get('step')} in {name}: {a} and {b}"
                far = max(far, _apart(a, b))
    if first:
        return f"differ {first}; by at most {far:.2g} of a value", False
    return f"{len(before)} rows", True


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield {k: v for k, v in row.items() if v and not str(k).startswith(TIMINGS)}


def _results(one: Path, other: Path) -> tuple[str, bool]:
    before, now = (
        {k: v for k, v in json.loads(path.read_bytes()).items() if not k.startswith(TIMINGS)}
        for path in (one, other)
    )
    for name in {**before, **now}:
        a, b = before.get(name), now.get(name)
        if differences(a, b):
            return f"differ in {name}: {a} and {b}", False
    return f"{len(before)} values", True


def _apart(a: Any, b: Any) -> float:
    """How far two numbers are from one another, of the larger one."""
    try:
        one, other = float(a), float(b)
    except ValueError:
        return math.inf
    return abs(one - other) / (max(abs(one), abs(other)) or 1.0)


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
        a, b = (x.to_dense() if x.is_sparse else x for x in (a, b))
        same = a.dtype == b.dtype and a.shape == b.shape
        same = same and bool(((a == b) | ((a != a) & (b != b))).all())  # a NaN equals a NaN
        return [] if same else [where]
    if isinstance(a, dict):
        found = [f"{where}: {sorted(a.keys() ^ b.keys(), key=str)}"] if a.keys() != b.keys() else []
        for key in a.keys() & b.keys():
            found += differences(a[key], b[key], f"{where}/{key}")
        return found
    if isinstance(a, (list, tuple, deque)) and len(a) == len(b):
        pairs = zip(a, b, strict=True)
        return [d for i, (x, y) in enumerate(pairs) for d in differences(x, y, f"{where}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {a!r:.60} != {b!r:.60}"]


def unmarked(node: Any) -> Any:
    """Without the mark of an object that was there when training began.

    It goes by ids, which Python may give again to one that was made later.
    """
    return node["of"] if isinstance(node, dict) and node.get("#") == "same" else node
