"""Read runs from their folders in any state: finished, running, stopped, failed or damaged.

In: folders. Out: what each run's files say, all runs in one frame. Next: ``table``, which compares
them. Imports no torch, Hydra or OmegaConf: a thousand runs are read in a second or two.
"""

import fcntl
import itertools
import json
import math
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from harness import record
from harness.checkpoints.lookup import by_step
from harness.errors import UserError
from harness.names import flat, shown

if TYPE_CHECKING:
    import polars as pl  # takes a tenth of a second, which a command need not wait for

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may come without libyaml
# Settings that say where a run is, and not what it computes.
PLACES = ("run_dir", "output_dir", "resume", "name", "tags", "notes", "objective", "mode")
FACTS = ("started", "seconds", "samples/s", "commit", "tags", "notes", "mode", "reason")
CONFIG, RESULTS, METRICS = "config.yaml", "results.json", "metrics.csv"


class Runs(NamedTuple):
    """Runs as a frame: a row each, columns for facts, then metrics, then settings by full keys."""

    frame: "pl.DataFrame"
    settings: list[str]  # the columns that are settings


def find(folders: Sequence[Path]) -> Runs:
    """Read all trainings in folders, in the order of their paths.

    Raises:
        UserError: if there is no such folder, or no run.
    """
    runs: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder. Give runs, or folders of runs.")
        for path, inside, files in os.walk(folder):
            if CONFIG in files:
                inside.clear()  # evaluations in a run's folder are no runs
                runs.setdefault(Path(path).resolve(), read(Path(path)))
            inside[:] = sorted(name for name in inside if not name.startswith("."))
    if not runs:
        raise UserError("There is no run. Give folders of runs, such as outputs/.")
    return as_frame([*runs.values()])


def as_frame(runs: Sequence[dict[str, Any]]) -> Runs:
    """Make a frame of what ``read`` gives; a column that has a text somewhere is text."""
    import polars as pl

    def cell(value: Any) -> Any:
        if value is None or isinstance(value, (int, float)):
            return value
        text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
        return text.encode(errors="replace").decode()  # a folder may be named by any bytes

    facts = [name for name in runs[0] if name not in ("metrics", "settings")]
    columns = {name: [run[name] for run in runs] for name in facts}
    names: dict[str, list[str]] = {}
    for kind in ("settings", "metrics"):
        names[kind] = []
        for name in dict.fromkeys(itertools.chain(*(run[kind] for run in runs))):
            # A metric may be called "seconds", as a fact is, or "seed", as a setting is.
            names[kind].append(f"{kind}.{name}" if name in columns else name)
            columns[names[kind][-1]] = [run[kind].get(name) for run in runs]
    order = [*facts, *names["metrics"], *names["settings"]]
    series = [pl.Series(name, [*map(cell, columns[name])], strict=False) for name in order]
    return Runs(pl.DataFrame(series), names["settings"])


def read(folder: Path) -> dict[str, Any]:
    """Read one run's folder: facts, ``metrics`` and ``settings``; raises for nothing in it.

    Its status is finished, running, failed, stopped or damaged. What is not known is ``None``.
    """
    config: Any = None
    metrics: dict[str, float] | None = None
    with suppress(OSError, ValueError, yaml.YAMLError):
        config = yaml.load((folder / CONFIG).read_bytes(), LOADER)
    with suppress(OSError, ValueError, AttributeError):
        values = json.loads((folder / RESULTS).read_bytes())
        metrics = {k: v for k, v in values.items() if isinstance(v, (int, float))}
    noted, is_whole = record.read(folder), isinstance(config, dict) and "model" in config
    config, reason = config if is_whole else {}, None
    if not is_whole and (folder / CONFIG).exists():  # a job that was refused has none
        status, reason = "damaged", f"{CONFIG} cannot be read"
    elif is_locked(folder / ".lock"):
        status = "running"
    elif metrics is not None:
        status = "finished"
    elif (folder / RESULTS).exists():
        status, reason = "damaged", f"{RESULTS} cannot be read"
    else:
        status = "failed" if noted.get("status") == "failed" else "stopped"
        saved = by_step(folder / "checkpoints")
        where = f"after {saved[-1].stem}" if saved else "before its first checkpoint"
        reason = str(noted.get("reason") or f"killed {where}")
    best = noted.get("best") if status == "finished" else None
    is_known = isinstance(best, (int, float)) and math.isfinite(best)
    return {
        "run": shown(folder),
        "status": status,
        "reason": reason,
        "started": (noted.get("starts") or [{}])[0].get("time"),
        "seconds": noted.get("seconds"),
        "samples/s": noted.get("samples_per_second"),
        "commit": str(noted.get("commit") or "")[:10] or None,
        **{name: config.get(name) or None for name in ("tags", "notes", "objective", "mode")},
        "best": best if is_known else _best_so_far(folder, config),
        "metrics": metrics or {},
        "settings": flat({key: node for key, node in config.items() if key not in PLACES}),
    }


def _best_so_far(folder: Path, config: dict[str, Any]) -> Any:
    """Return the best value that a run has logged of its objective."""
    table = read_table(folder / METRICS)
    if (name := config.get("objective")) not in table.columns:
        return None
    values = table[name].filter(table[name].is_finite())
    return values.max() if config.get("mode") == "max" else values.min()


def read_table(path: Path) -> "pl.DataFrame":
    """Read a table of metrics: ``step``, then a column per metric; null where it has no number."""
    import polars as pl

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
