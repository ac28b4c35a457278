"""Read runs from their folders in any state: finished, running, stopped, failed or damaged.

In: folders. Out: what each run's files say. Next: ``frame``, which puts them into one table.
Imports no torch, Hydra or OmegaConf: a thousand runs are read in a second or two.
"""

import fcntl
import json
import math
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from harness import record
from harness.errors import UserError

if TYPE_CHECKING:
    import polars as pl

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may come without libyaml
CONFIG, RESULTS, METRICS = "config.yaml", "results.json", "metrics.csv"
SPEED = "throughput/samples_per_second"
FACTS: tuple[str, ...]
FACTS = ("run", "status", "reason", "started", "seconds", "samples/s", "held back by", "peak MiB")
FACTS += ("commit", "tags", "notes", "step", "objective", "mode", "best")


@dataclass
class RunFiles:
    """What a run's folder says of it.

    Attributes:
        folder: of the run.
        config: its frozen settings; empty where they are missing or damaged.
        results: the last value of each metric; ``None`` where it has not finished.
        record: see ``harness.record``.
        damage: why its settings cannot be read.
    """

    folder: Path
    config: dict[str, Any]
    results: dict[str, float] | None
    record: dict[str, Any]
    damage: str = ""

    @cached_property
    def status(self) -> str:
        """``finished``, ``running``, ``failed``, ``stopped`` or ``damaged``."""
        if self.damage:
            return "damaged"
        if is_locked(self.folder / ".lock"):
            return "running"
        if self.results is not None:
            return "finished"
        return "failed" if self.record.get("status") == "failed" else "stopped"

    @cached_property
    def table(self) -> "pl.DataFrame":
        """All values that were logged: ``step``, and a column for each metric."""
        return read_table(self.folder / METRICS)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric, also of a run that has not finished."""
        columns = {name: self.table[name].drop_nulls() for name in self.table.columns[1:]}
        return self.results or {name: values[-1] for name, values in columns.items() if len(values)}

    @property
    def objective(self) -> tuple[str, str]:
        """The metric that ``best.ckpt`` was chosen by, and ``min`` or ``max``; empty if unknown."""
        return str(self.config.get("objective") or ""), str(self.config.get("mode") or "")

    @cached_property
    def best(self) -> float | None:
        """The best value of its objective so far."""
        name, mode = self.objective
        if self.status == "finished" and "best" in self.record:
            return float(self.record["best"])
        if name not in self.table.columns:
            return None
        values = self.table[name].drop_nulls().to_list()
        pick = max if mode == "max" else min
        return pick(filter(math.isfinite, values), default=None)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Everything that is known beside metrics and settings; ``None`` where it is not."""
        noted, reason = self.record, self.damage
        names = [path.stem[5:] for path in self.folder.glob("checkpoints/step_*.ckpt")]
        step = max((int(name) for name in names if name.isdigit()), default=None)
        if self.status in ("failed", "stopped"):
            where = "before its first checkpoint" if step is None else f"after step {step}"
            reason = str(noted.get("reason") or f"killed {where}")
        started, seconds = (noted.get("starts") or [{}])[0].get("time"), noted.get("seconds")
        if self.status == "running" and started:
            seconds = time.time() - started
        values = (
            *(str(self.folder), self.status, reason, started, seconds),
            *(noted.get("samples_per_second", self.metrics.get(SPEED)), noted.get("verdict")),
            *(noted.get("peak_mib"), str(noted.get("commit") or "")[:10], self.config.get("tags")),
            *(self.config.get("notes"), step, *self.objective, self.best),
        )
        return {k: None if v in ("", []) else v for k, v in zip(FACTS, values, strict=True)}


def find(folders: Sequence[Path]) -> list[RunFiles]:
    """Read all trainings in folders, in the order of their paths.

    Raises:
        UserError: if there is no such folder.
    """
    paths: dict[str, str] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder. Give runs, or folders of runs.")
        for path in _run_folders(str(folder)):
            paths.setdefault(os.path.realpath(path), path)
    return [read(Path(path)) for path in paths.values()]


def _run_folders(folder: str) -> Iterator[str]:
    """Find folders with a config; evaluations inside of such a folder are no runs."""
    for path, inside, files in os.walk(folder):
        if CONFIG in files:
            inside.clear()
            yield path
        inside[:] = sorted(name for name in inside if not name.startswith("."))


def read(folder: Path) -> RunFiles:
    """Read one run's folder; never raises for what is in it."""
    config, damage, results = {}, "", None
    try:
        config = yaml.load((folder / CONFIG).read_bytes(), LOADER)
        if not isinstance(config, dict) or not {"data", "model"} <= config.keys():
            config, damage = {}, f"{CONFIG} is not the config of a run"
    except FileNotFoundError:  # a sweep's job that has not begun, or was refused
        pass
    except (OSError, ValueError, yaml.YAMLError) as error:
        damage = f"{CONFIG} cannot be read: {' '.join(str(error).split())[:100]}"
    with suppress(OSError, ValueError, AttributeError):
        values = json.loads((folder / RESULTS).read_bytes())
        results = {k: v for k, v in values.items() if isinstance(v, (int, float))}
    return RunFiles(folder, config, results, record.read(folder), damage)


def read_table(path: Path) -> "pl.DataFrame":
    """Read a table of metrics: ``step``, then a column per metric; null where it has no number."""
    import polars as pl  # takes a tenth of a second, which a command need not wait for

    try:
        options: dict[str, Any] = {"truncate_ragged_lines": True, "encoding": "utf8-lossy"}
        # No globbing: a folder may be called lr[0.1].
        table = pl.read_csv(path, infer_schema=False, glob=False, **options)
    except (OSError, pl.exceptions.PolarsError):  # missing, or still empty
        table = pl.DataFrame()
    if "step" not in table.columns:
        return pl.DataFrame(schema={"step": pl.Int64})
    metrics = pl.exclude("step").cast(pl.Float64, strict=False)
    return table.select(pl.col("step").cast(pl.Int64, strict=False), metrics).drop_nulls("step")


def is_locked(path: Path) -> bool:
    """Ask whether a process holds a lock of a file, without taking it."""
    question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with path.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:  # no such file, or a file system without locks
        return False
    return bool(struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK)
