"""Runs as they lie on the disk: finished, running, stopped, failed, damaged.

Nothing here imports torch, Hydra or OmegaConf: a thousand runs are read in a second or two.
"""

import fcntl
import json
import math
import os
import shlex
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from harness import record
from harness.errors import UserError
from harness.frozen_files import STARTED
from harness.names import flat

if TYPE_CHECKING:
    import polars

# OmegaConf has libyaml's parser as well; where PyYAML comes without it, reading takes longer.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
CONFIG, RESULTS, METRICS = "config.yaml", "results.json", "metrics.csv"
SPEED = "throughput/samples_per_second"
# What says where a run is, and not what it is made of.
PLACES = ("run_dir", "output_dir", "resume", "name", "tags", "notes")


@dataclass
class RunFiles:
    """What a run's folder says of it.

    Attributes:
        folder: of the run.
        config: its frozen settings; empty where they are damaged.
        results: the last value of each metric; empty where it has not finished.
        record: see ``harness.record``.
        damage: why its settings cannot be read.
    """

    folder: Path
    config: dict[str, Any]
    results: dict[str, float]
    record: dict[str, Any]
    damage: str = ""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings by their whole keys, without places."""
        return {
            key: value
            for key, value in flat(self.config).items()
            if key.partition(".")[0] not in PLACES
        }

    @cached_property
    def status(self) -> str:
        """``finished``, ``running``, ``failed``, ``stopped`` or ``damaged``."""
        if self.damage:
            return "damaged"
        if is_locked(self.folder / ".lock"):
            return "running"
        noted = str(self.record.get("status") or "stopped")
        return "finished" if self.results else "stopped" if noted == "finished" else noted

    @cached_property
    def reason(self) -> str:
        """Why it failed, was stopped or is damaged."""
        if self.damage or self.status in ("finished", "running"):
            return self.damage
        if self.record.get("reason"):
            return str(self.record["reason"])
        step = self.step
        return "killed before its first checkpoint" if step is None else f"killed after step {step}"

    @cached_property
    def step(self) -> int | None:
        """The optimizer step of its newest checkpoint."""
        names = [path.stem[5:] for path in self.folder.glob("checkpoints/step_*.ckpt")]
        return max((int(name) for name in names if name.isdigit()), default=None)

    @cached_property
    def started(self) -> float | None:
        """When it was started, in seconds since 1970."""
        with suppress(OSError, ValueError):
            for line in (self.folder / "overrides.yaml").read_text().splitlines()[:3]:
                if line.startswith(STARTED):
                    return datetime.fromisoformat(line.removeprefix(STARTED).strip()).timestamp()
        return None

    @cached_property
    def words(self) -> str:
        """What was typed after the command, or what a sweep made of it for this run."""
        with suppress(OSError, ValueError, yaml.YAMLError):
            found = yaml.load((self.folder / "overrides.yaml").read_bytes(), LOADER)
            return shlex.join(map(str, found)) if isinstance(found, list) else ""
        return ""

    @cached_property
    def seconds(self) -> float | None:
        """How long it was computed; of what was killed, until it wrote for the last time."""
        if "seconds" in self.record and self.status != "running":
            return float(self.record["seconds"])
        path = self.folder / METRICS
        if self.started is None or not (path.is_file() or self.status == "running"):
            return None
        return (time.time() if self.status == "running" else path.stat().st_mtime) - self.started

    @cached_property
    def speed(self) -> float | None:
        """Training samples per second, over all processes."""
        points = self.curves.get(SPEED)
        last = points[-1][1] if points else None
        return self.record.get("samples_per_second", last)

    @property
    def objective(self) -> str | None:
        """The logged value that best.ckpt is the best of."""
        found = self.config.get("objective")
        return None if found is None else str(found)

    @cached_property
    def best(self) -> float | None:
        """The best value of its objective."""
        if self.status == "finished" and "best" in self.record:
            return float(self.record["best"])
        values = [v for _, v in self.curves.get(self.objective or "", []) if math.isfinite(v)]
        if not values:
            return None
        return max(values) if self.config.get("mode") == "max" else min(values)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric, also of a run that has not finished."""
        return self.results or {name: points[-1][1] for name, points in self.curves.items()}

    @cached_property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Each metric's steps and values; empty where there is no table."""
        table = read_table(self.folder / METRICS)
        columns = {name: table.select("step", name).drop_nulls() for name in table.columns[1:]}
        return {name: points.rows() for name, points in columns.items() if len(points)}


def find(folders: Sequence[Path]) -> list[RunFiles]:
    """All trainings in folders, by their paths.

    Raises:
        UserError: if there is no such folder.
    """
    found: dict[str, RunFiles] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder. Give runs, or folders of runs.")
        for path in _run_folders(str(folder)):
            found.setdefault(os.path.realpath(path), read(Path(path)))
    return list(found.values())


def _run_folders(folder: str) -> Iterator[str]:
    """Folders with a config, which are not looked into: evaluations of a run are inside of it."""
    with suppress(OSError), os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
        if any(entry.name == CONFIG for entry in inside):
            yield folder
            return
        for entry in inside:
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield from _run_folders(entry.path)


def read(folder: Path) -> RunFiles:
    """What one run's folder says; never raises for what is in it."""
    config, damage = {}, ""
    try:
        found = yaml.load((folder / CONFIG).read_bytes(), LOADER)  # a safe loader
        if isinstance(found, dict) and {"data", "model"} <= found.keys():
            config = found
        else:
            damage = f"{CONFIG} is not the config of a run"
    except (OSError, ValueError, yaml.YAMLError) as error:
        damage = f"{CONFIG} cannot be read: {' '.join(str(error).split())[:100]}"
    results: dict[str, float] = {}
    with suppress(OSError, ValueError):
        found = json.loads((folder / RESULTS).read_bytes())
        if isinstance(found, dict):
            results = {k: v for k, v in found.items() if isinstance(v, (int, float))}
    return RunFiles(folder, config, results, record.read(folder), damage)


def read_table(path: Path) -> "polars.DataFrame":
    """A table of metrics: ``step``, then a column per metric; null where it holds no number."""
    import polars

    try:
        found = polars.read_csv(
            path,
            infer_schema=False,
            truncate_ragged_lines=True,
            encoding="utf8-lossy",
            glob=False,  # a folder may be called lr[0.1]
        )
    except (OSError, polars.exceptions.PolarsError):  # none, or nothing is in it yet
        found = polars.DataFrame()
    if "step" not in found.columns:
        return polars.DataFrame(schema={"step": polars.Int64})
    metrics = polars.exclude("step").cast(polars.Float64, strict=False)
    found = found.select(polars.col("step").cast(polars.Int64, strict=False), metrics)
    return found.drop_nulls("step")


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock of a file; asked for without taking it."""
    question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with path.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:  # no such file, or a file system without locks
        return False
    kind: int = struct.unpack("hhqqi", answer)[0]
    return kind != fcntl.F_UNLCK
