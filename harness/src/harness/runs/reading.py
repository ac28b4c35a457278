"""Read runs from their folders in any state: finished, running, stopped, failed or damaged.

In: folders. Out: one data frame with a row per run. Next: ``table`` compares the runs. This file
imports no torch, Hydra or OmegaConf, so it reads a thousand runs in a second or two.
"""

import fcntl
import itertools
import math
import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import provenance, untrusted
from harness.checkpoints.lookup import by_step
from harness.display import display_path
from harness.errors import UserError
from harness.files import MAX_YAML, read_bytes
from harness.keys import flatten
from harness.runs import configs

if TYPE_CHECKING:
    import polars as pl  # imported where it is used, because that takes 0.1 s

MAX_NAMES = 5_000  # settings, or metrics, of a run
INT_LIMIT = 2**63  # a column's whole numbers have 64 bits
# Settings that do not change the computation.
NOT_COMPARED = ("run_dir", "output_dir", "resume", "name", "tags", "notes", "objective", "mode")
GPU = ("gpu_gib", "gpu_busy")  # peak memory of a GPU; fraction of time in use
FACTS = ("started", "seconds", "samples/s", *GPU, "commit", "tags", "notes", "mode", "reason")
CONFIG, RESULTS, METRICS = "config.yaml", "results.json", "metrics.csv"


class Runs(NamedTuple):
    """A data frame with one row per run."""

    frame: "pl.DataFrame"  # columns: facts, then metrics, then settings by their full keys
    settings: list[str]  # the columns that are settings


def find(folders: Sequence[Path]) -> Runs:
    """Read all training runs in folders, in the order of their paths.

    Raises:
        UserError: a folder does not exist, or there is no run.
    """
    runs: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder. Name runs, or folders that contain runs.")
        for path, subfolders, files in os.walk(folder):
            if CONFIG in files or _has_failed_early(path, files):
                subfolders.clear()  # evaluations in a run's folder are not runs
                runs.setdefault(Path(path).resolve(), read(Path(path)))
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
    if not runs:
        raise UserError("There is no run in these folders. Name other folders, such as outputs/.")
    return as_frame([*runs.values()])


def _has_failed_early(path: str, files: Sequence[str]) -> bool:
    """Return whether a job of a sweep has failed before its run began."""
    has_record = provenance.FILE in files and RESULTS not in files
    return has_record and provenance.read(Path(path)).get("status") == "failed"


def as_frame(runs: Sequence[dict[str, Any]]) -> Runs:
    """Make a data frame of the dictionaries that ``read`` returns, one per run.

    A column with a text in one row has texts in all rows.
    """
    import polars as pl

    def cell(value: Any) -> Any:
        if value is None or isinstance(value, float):
            return value
        if isinstance(value, int):
            if -INT_LIMIT < value < INT_LIMIT:
                return value
            return float(value) if -(INT_LIMIT**16) < value < INT_LIMIT**16 else str(value)
        text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
        return text.encode(errors="replace").decode()  # a folder's name may be any bytes

    facts = [name for name in runs[0] if name not in ("metrics", "settings")]
    columns = {name: [run[name] for run in runs] for name in facts}
    names: dict[str, list[str]] = {}
    for kind in ("settings", "metrics"):
        names[kind] = []
        for name in dict.fromkeys(itertools.chain(*(run[kind] for run in runs))):
            # A metric may have the name of a fact, such as "seconds", or of a setting.
            names[kind].append(f"{kind}.{name}" if name in columns else name)
            columns[names[kind][-1]] = [run[kind].get(name) for run in runs]
    order = [*facts, *names["metrics"], *names["settings"]]
    series = [pl.Series(name, [*map(cell, columns[name])], strict=False) for name in order]
    return Runs(pl.DataFrame(series), names["settings"])


def read(folder: Path) -> dict[str, Any]:
    """Return a run's facts, ``metrics`` and ``settings``.

    A damaged file raises no exception. The status is finished, running, failed, stopped or
    damaged; an unknown fact is ``None``.
    """
    unreadable: list[str] = []  # files that exist, but are damaged or too large

    def read_file(name: str, parse: Callable[[Path], Any]) -> Any:
        try:
            return parse(folder / name)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, UserError):
            unreadable.append(name)

    empty: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # a refused job has no config
    config, settings = read_file(CONFIG, _config_of) or empty
    metrics = read_file(RESULTS, _numbers_of)
    recorded = read_file(provenance.FILE, provenance.checked) or {}
    best = recorded.get("best") if metrics is not None else None
    if not (isinstance(best, (int, float)) and math.isfinite(best)):
        best = read_file(METRICS, partial(_best_so_far, config=config))
    reason = None
    if unreadable:
        status, reason = "damaged", f"{unreadable[0]} cannot be read"
    elif is_locked(folder / ".lock"):
        status = "running"
    elif metrics is not None:
        status = "finished"
    else:
        status = "failed" if recorded.get("status") == "failed" else "stopped"
        saved = by_step(folder / "checkpoints")
        when = f"after {saved[-1].stem}" if saved else "before its first checkpoint"
        reason = str(recorded.get("reason") or f"killed {when}")
    return {
        "run": display_path(folder),
        "status": status,
        "reason": reason,
        "started": (recorded.get("starts") or [{}])[0].get("time"),
        "seconds": recorded.get("seconds"),
        "samples/s": recorded.get("samples_per_second"),
        **{name: recorded.get(name) for name in GPU},
        "commit": str(recorded.get("commit") or "")[:10] or None,
        **{name: config.get(name) or None for name in ("tags", "notes", "objective", "mode")},
        "best": best,
        "metrics": metrics or {},
        "settings": settings,
    }


def _config_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's config, and its settings by their full keys."""
    config = configs.parse(read_bytes(path, MAX_YAML))
    if not isinstance(config, dict) or "model" not in config:
        raise ValueError("it is not the config of a run")
    settings = flatten({key: node for key, node in config.items() if key not in NOT_COMPARED})
    return config, _check_num_names(settings)


def _numbers_of(path: Path) -> dict[str, float]:
    """Return the metrics in a run's results."""
    values = untrusted.read_json(path).items()
    return _check_num_names({name: v for name, v in values if isinstance(v, (int, float))})


def _check_num_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values; raise a ValueError if they would become too many columns."""
    if len(values) > MAX_NAMES:
        raise ValueError(f"it has more than {MAX_NAMES:,} names")
    return values


def _best_so_far(path: Path, config: dict[str, Any]) -> Any:
    """Return the best value that a run has logged of its objective, or ``None``."""
    table = read_table(path)
    if (name := config.get("objective")) not in table.columns:
        return None
    values = table[name].filter(table[name].is_finite())
    return values.max() if config.get("mode") == "max" else values.min()


def read_table(path: Path) -> "pl.DataFrame":
    """Read a table of metrics: ``step``, then one column per metric. A missing value is null.

    A missing, empty or damaged table has no rows.

    Raises:
        UserError: it is no regular file, or has too many cells.
    """
    import polars as pl

    try:
        data = untrusted.table_bytes(path)
        table = pl.read_csv(data, infer_schema=False, truncate_ragged_lines=True)
    except (FileNotFoundError, pl.exceptions.PolarsError):  # missing, empty or damaged
        table = pl.DataFrame()
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}.") from error
    if "step" not in table.columns:
        return pl.DataFrame(schema={"step": pl.Int64})
    metrics = pl.exclude("step").cast(pl.Float64, strict=False)
    return table.select(pl.col("step").cast(pl.Int64, strict=False), metrics).drop_nulls("step")


def is_locked(path: Path) -> bool:
    """Return whether a process has locked a file, without locking it."""
    request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            reply = fcntl.fcntl(file, fcntl.F_GETLK, request)
    except OSError:  # the file does not exist, or its file system has no locks
        return False
    return bool(struct.unpack("hhqqi", reply)[0] != fcntl.F_UNLCK)
