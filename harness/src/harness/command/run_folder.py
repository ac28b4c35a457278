"""What a run's folder holds: config, words, results, checkpoints.

In: a run's folder. Out: what a run has written there, or a ``UserError`` that names the file.
``which_run`` chooses the folder. This file imports no torch: mistakes are answered at once.
"""

import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.errors import UserError
from harness.files import read_json, read_yaml, write_yaml
from harness.record import NEXT

STARTED = "# started "  # begins a line of overrides.yaml
UNREADABLE = (OmegaConfBaseException, YAMLError, OSError, LookupError, TypeError, ValueError)


def freeze(cfg: DictConfig, run_dir: Path) -> DictConfig:
    """Fill in all values but the run's folder, so that a copy of it does not name the original."""
    cfg.run_dir = r"\${run_dir}"
    frozen: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    frozen.run_dir = cfg.run_dir = str(run_dir)
    return frozen  # type: ignore[no-any-return]


def resolved(frozen: DictConfig) -> DictConfig:
    """The same with the folder filled in."""
    return OmegaConf.create(OmegaConf.to_container(frozen, resolve=True))  # type: ignore[return-value]


def save_config(frozen: DictConfig, run_dir: Path, name: str = "config.yaml") -> None:
    """Write ``config.yaml``; whoever reads it meanwhile gets the old one or the new one."""
    write_yaml(run_dir / name, OmegaConf.to_yaml(frozen))


def load_next_config(run_dir: Path) -> DictConfig:
    """Read the config of a run that begins or goes on, in a process that its first one starts."""
    return load_config(run_dir, NEXT if (run_dir / NEXT).exists() else "config.yaml")


def load_config(run_dir: Path, name: str = "config.yaml") -> DictConfig:
    """Read a run's frozen config, wherever its folder is now; a UserError if it is damaged."""
    path = run_dir / name
    try:
        frozen: Any = OmegaConf.create(read_yaml(path))
        if missing := {"data", "model", "seed", "trainer"} - frozen.keys():
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        frozen.run_dir = str(run_dir)
        resolved(frozen)
    except UNREADABLE as error:
        raise UserError(
            f"{path} is not the config of a run: {' '.join(str(error).split())}.\n"
            "Bring it back from a copy, or start another run."
        ) from error
    return frozen  # type: ignore[no-any-return]


def save_words(words: list[str], run_dir: Path) -> None:
    """Write ``overrides.yaml``: when a run was started, and the words that started it."""
    started = f"{STARTED}{datetime.now(UTC).isoformat()}\n"
    text = OmegaConf.to_yaml(OmegaConf.create(words))
    write_yaml(run_dir / "overrides.yaml", started + text)


def load_words(run_dir: Path) -> list[str]:
    """Read what was typed when a run was started; nothing where there is no such file."""
    try:
        return as_typed(read_yaml(run_dir / "overrides.yaml"))
    except UNREADABLE:
        return []


def as_typed(text: str) -> list[Any]:
    """The words in a YAML text, where ``${run_dir}`` refers to nothing."""
    words: list[Any] = OmegaConf.to_container(OmegaConf.create(text))  # type: ignore[assignment]
    return words


def results(run_dir: Path) -> dict[str, float]:
    """Read the last value of every metric; empty while the run has not finished."""
    with suppress(OSError, ValueError):  # ValueError: damaged, in a run of an older version
        values: dict[str, float] = json.loads(read_json(run_dir / "results.json"))
        return values
    return {}


def best_checkpoint(run_dir: Path) -> Path:
    """The checkpoint that a run has tested, or the last one of a run that kept no best."""
    for name in ("best.ckpt", "last.ckpt"):
        if (path := run_dir / "checkpoints" / name).is_file():
            return path
    raise UserError(f"The run in {run_dir} has no checkpoint, which would hold its weights.")


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / name).exists() for name in ("config.yaml", "overrides.yaml"))


def runs_in(parent: Path) -> list[Path]:
    """The runs in a folder, in the order in which they were started."""
    return sorted((path.parent.resolve() for path in parent.glob("*/overrides.yaml")), key=_started)


def _started(run_dir: Path) -> float:
    """When a run was started: as it has written itself, whatever the times of a copy's files."""
    path = run_dir / "overrides.yaml"
    with suppress(OSError, ValueError):
        if line := re.search(f"^{STARTED}(.+)$", path.read_text(), re.MULTILINE):
            return datetime.fromisoformat(line[1]).timestamp()
    return path.stat().st_mtime


def config_of_checkpoint(checkpoint: Path) -> Path:
    """The config of the run that wrote a checkpoint; a UserError if either is missing."""
    if checkpoint.is_dir():  # of a run, of its checkpoints, or of several runs
        patterns = ("best.ckpt", *(f"{'*/' * depth}checkpoints/best.ckpt" for depth in range(3)))
        best = [path for pattern in patterns for path in checkpoint.glob(pattern)]
        newest = max(best, key=lambda path: path.stat().st_mtime, default=None)
        file = newest or "<run>/checkpoints/<name>.ckpt"
        raise UserError(f"checkpoint={checkpoint} is a folder. Use checkpoint={file}")
    if not checkpoint.is_file():
        there = sorted(str(path) for path in checkpoint.parent.glob("*.ckpt"))
        hint = f" There is {', '.join(there)}." if there else ""
        raise UserError(f"checkpoint={checkpoint}: there is no such file.{hint}")
    config = checkpoint.resolve().parent.parent / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"checkpoint={checkpoint}: there is no {config}, which says how to build its model.\n"
            "Keep a checkpoint in the checkpoints/ folder of its run."
        )
    return config
