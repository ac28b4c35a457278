"""Read runs from their folders in any state: finished, running, stopped, failed or damaged.

In: folders. Out: what each run's files say. Next: ``table``, which compares them.
Imports no torch, Hydra or OmegaConf: a thousand runs are read in a second or two.
"""

import fcntl
import json
import math
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from harness import record
from harness.checkpoints.lookup import by_step
from harness.errors import UserError
from harness.names import flat

if TYPE_CHECKING:
    import polars as pl

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may come without libyaml
# Settings that say where a run is, and not what it computes.
PLACES = ("run_dir", "output_dir", "resume", "name", "tags", "notes", "objective", "mode")
CONFIG, RESULTS, METRICS = "config.yaml", "results.json", "metrics.csv"


@dataclass
class RunFiles:
    """What a run's folder says of it."""

    folder: Path
    status: str  # finished, running, failed, stopped or damaged
    config: dict[str, Any]  # its frozen settings; empty where they are missing or damaged
    results: dict[str, float]  # the last value of each metric; empty until it has finished
    record: dict[str, Any]  # see ``harness.record``

    @cached_property
    def table(self) -> "pl.DataFrame":
        """All values that were logged: ``step``, and a column for each metric."""
        return read_table(self.folder / METRICS)

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
        pick = max if mode == "max" else min
        return pick(filter(math.isfinite, self.table[name].drop_nulls()), default=None)

    @property
    def reason(self) -> str | None:
        """Why it has not finished."""
        if self.status == "damaged":
            return f"{RESULTS if self.config else CONFIG} cannot be read"
        if self.status not in ("failed", "stopped"):
            return None
        saved = by_step(self.folder / "checkpoints")
        where = f"after {saved[-1].stem}" if saved else "before its first checkpoint"
        return str(self.record.get("reason") or f"killed {where}")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Its settings by their full keys."""
        own = {key: node for key, node in self.config.items() if key not in PLACES}
        return flat(own)

    @cached_property
    def values(self) -> dict[str, Any]:
        """Its facts, metrics and settings."""
        return self.facts | self.results | self.settings

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What there is beside metrics and settings; ``None`` where it is not known."""
        noted, (objective, mode) = self.record, self.objective
        facts = {
            "run": str(self.folder),
            "status": self.status,
            "reason": self.reason,
            "started": (noted.get("starts") or [{}])[0].get("time"),
            "seconds": noted.get("seconds"),
            "samples/s": noted.get("samples_per_second"),
            "commit": str(noted.get("commit") or "")[:10],
            "tags": self.config.get("tags"),
            "notes": self.config.get("notes"),
            "objective": objective,
            "mode": mode,
            "best": self.best,
        }
        return {name: None if value in ("", []) else value for name, value in facts.items()}


def find(folders: Sequence[Path]) -> list[RunFiles]:
    """Read all trainings in folders, in the order of their paths.

    Raises:
        UserError: if there is no such folder.
    """
    runs: dict[Path, RunFiles] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder. Give runs, or folders of runs.")
        for path, inside, files in os.walk(folder):
            if CONFIG in files:
                inside.clear()  # evaluations in a run's folder are no runs
                runs.setdefault(Path(path).resolve(), read(Path(path)))
            inside[:] = sorted(name for name in inside if not name.startswith("."))
    return [*runs.values()]


def read(folder: Path) -> RunFiles:
    """Read one run's folder; never raises for what is in it."""
    config: Any = None
    results: dict[str, float] | None = None
    with suppress(OSError, ValueError, yaml.YAMLError):
        config = yaml.load((folder / CONFIG).read_bytes(), LOADER)
    with suppress(OSError, ValueError, AttributeError):
        values = json.loads((folder / RESULTS).read_bytes())
        results = {k: v for k, v in values.items() if isinstance(v, (int, float))}
    noted, is_whole = record.read(folder), isinstance(config, dict) and "model" in config
    if not is_whole and (folder / CONFIG).exists():  # a job that was refused has none
        status = "damaged"
    elif is_locked(folder / ".lock"):
        status = "running"
    elif (folder / RESULTS).exists():
        status = "damaged" if results is None else "finished"
    else:
        status = "failed" if noted.get("status") == "failed" else "stopped"
    return RunFiles(folder, status, config if is_whole else {}, results or {}, noted)


def read_table(path: Path) -> "pl.DataFrame":
    """Read a table of metrics: ``step``, then a column per metric; null where it has no number."""
    import polars as pl  # takes a tenth of a second, which a command need not wait for

    try:
        # No globbing: a folder may be called lr[0.1].
        table = pl.read_csv(path, infer_schema=False, glob=False, truncate_ragged_lines=True)
    except (OSError, pl.exceptions.PolarsError):  # missing, empty or damaged
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
