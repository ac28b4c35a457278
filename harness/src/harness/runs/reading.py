"""Read runs from their folders in any state: finished, running, stopped, failed or damaged.

In: folders. Out: what each run's files say, all runs in one frame. Next: ``table``, which compares
them. Imports no torch, Hydra or OmegaConf: a thousand runs are read in a second or two.
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

from harness import record, untrusted
from harness.checkpoints.lookup import by_step
from harness.errors import UserError
from harness.names import flat, shown

if TYPE_CHECKING:
    import polars as pl  # takes a tenth of a second, which a command need not wait for

MAX_NAMES = 5_000  # settings, or metrics, of a run
M = 2**63  # a column's whole numbers have 64 bits
# Settings that say where a run is, and not what it computes.
PLACES = ("run_dir", "output_dir", "resume", "name", "tags", "notes", "objective", "mode")
GPU = ("gpu_gib", "gpu_busy")  # the most memory taken of a GPU, and the fraction of the time
FACTS = ("started", "seconds", "samples/s", *GPU, "commit", "tags", "notes", "mode", "reason")
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
        if isinstance(value, int) and not -M < value < M:
            value = float(value) if -(M**16) < value < M**16 else str(value)
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
    unread: list[str] = []  # files that are there, and cannot be read within limits

    def tried(name: str, parse: Callable[[Path], Any]) -> Any:
        try:
            return parse(folder / name)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, UserError):
            unread.append(name)

    nothing: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # a job that was refused has none
    config, settings = tried(CONFIG, _config_of) or nothing
    metrics = tried(RESULTS, _numbers_of)
    noted = tried(record.FILE, record.checked) or {}
    best = noted.get("best") if metrics is not None else None
    if not (isinstance(best, (int, float)) and math.isfinite(best)):
        best = tried(METRICS, partial(_best_so_far, config=config))
    reason = None
    if unread:
        status, reason = "damaged", f"{unread[0]} cannot be read"
    elif is_locked(folder / ".lock"):
        status = "running"
    elif metrics is not None:
        status = "finished"
    else:
        status = "failed" if noted.get("status") == "failed" else "stopped"
        saved = by_step(folder / "checkpoints")
        where = f"after {saved[-1].stem}" if saved else "before its first checkpoint"
        reason = str(noted.get("reason") or f"killed {where}")
    return {
        "run": shown(folder),
        "status": status,
        "reason": reason,
        "started": (noted.get("starts") or [{}])[0].get("time"),
        "seconds": noted.get("seconds"),
        "samples/s": noted.get("samples_per_second"),
        **{name: noted.get(name) for name in GPU},
        "commit": str(noted.get("commit") or "")[:10] or None,
        **{name: config.get(name) or None for name in ("tags", "notes", "objective", "mode")},
        "best": best,
        "metrics": metrics or {},
        "settings": settings,
    }


def _config_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a run's config, and its settings by their full keys."""
    config = untrusted.read_yaml(path)
    if not isinstance(config, dict) or "model" not in config:
        raise ValueError("it is no config of a run")
    settings = flat({key: node for key, node in config.items() if key not in PLACES})
    return config, _few_names(settings)


def _numbers_of(path: Path) -> dict[str, float]:
    """Read the metrics of a run's results."""
    values = untrusted.read_json(path).items()
    return _few_names({name: v for name, v in values if isinstance(v, (int, float))})


def _few_names(values: dict[str, Any]) -> dict[str, Any]:
    """Refuse more names than a list of runs has room for: each becomes a column."""
    if len(values) > MAX_NAMES:
        raise ValueError(f"it has more than {MAX_NAMES:,} names")
    return values


def _best_so_far(path: Path, config: dict[str, Any]) -> Any:
    """Return the best value that a run has logged of its objective."""
    table = read_table(path)
    if (name := config.get("objective")) not in table.columns:
        return None
    values = table[name].filter(table[name].is_finite())
    return values.max() if config.get("mode") == "max" else values.min()


def read_table(path: Path) -> "pl.DataFrame":
    """Read a table of metrics: ``step``, then a column per metric; null where it has no number.

    Raises:
        UserError: if it is no regular file, or has more cells than are read.
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
    """Ask whether a process holds a lock of a file, without taking it."""
    question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:  # no such file, or a file system without locks
        return False
    return bool(struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK)
