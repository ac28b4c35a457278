"""What the folder of a run holds: config, words, results, checkpoints. No torch."""

import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness import frozen_files
from harness.errors import UserError
from harness.record import NEXT


def freeze(cfg: DictConfig, run_dir: Path) -> DictConfig:
    """Fill in all values but the run's folder: a copy of it must not name the original."""
    cfg.run_dir = r"\${run_dir}"
    if HydraConfig.initialized():  # ${hydra:runtime.output_dir} is the run's folder as well
        known: Any = HydraConfig.get()
        with read_write(known):
            known.runtime.output_dir = cfg.run_dir
    frozen: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    frozen.run_dir = cfg.run_dir = str(run_dir)
    return frozen  # type: ignore[no-any-return]


def resolved(frozen: DictConfig) -> DictConfig:
    """The same with the folder filled in."""
    return OmegaConf.create(OmegaConf.to_container(frozen, resolve=True))  # type: ignore[return-value]


def save_config(frozen: DictConfig, run_dir: Path) -> None:
    """Write ``config.yaml``; who reads it meanwhile gets the old one or the new one."""
    frozen_files.write_yaml(run_dir / "config.yaml", OmegaConf.to_yaml(frozen))


def save_next_config(frozen: DictConfig, run_dir: Path) -> None:
    """Write the config with which a run will go on, once nothing has refused it."""
    frozen_files.write_yaml(run_dir / NEXT, OmegaConf.to_yaml(frozen))


def load_next_config(run_dir: Path) -> DictConfig:
    """Read the config of a run that begins or goes on, in a process that its first one starts."""
    return load_config(run_dir, NEXT if (run_dir / NEXT).exists() else "config.yaml")


def load_config(run_dir: Path, name: str = "config.yaml") -> DictConfig:
    """Read a run's frozen ``config.yaml``, wherever its folder is now.

    Raises:
        UserError: if it is missing, damaged or edited.
    """
    path = run_dir / name
    try:
        frozen: Any = OmegaConf.create(frozen_files.read_yaml(path))
        missing = {"data", "model", "seed", "trainer"} - frozen.keys()
        if missing:
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        frozen.run_dir = str(run_dir)
        resolved(frozen)
    except (
        OmegaConfBaseException,
        YAMLError,
        OSError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(
            f"{path} is not the config of a run: {' '.join(str(error).split())}.\n"
            "Bring it back from a copy, or start another run."
        ) from error
    return frozen  # type: ignore[no-any-return]


def save_words(words: list[str], run_dir: Path) -> None:
    """Write ``overrides.yaml``: when a run was started, and the words that started it."""
    now = datetime.now(UTC).isoformat()
    text = OmegaConf.to_yaml(OmegaConf.create(words))
    frozen_files.write_yaml(run_dir / "overrides.yaml", f"{frozen_files.STARTED}{now}\n{text}")


def load_words(run_dir: Path) -> list[str]:
    """What was typed when a run was started; nothing where that is not known.

    Raises:
        UserError: if it was damaged or edited.
    """
    try:
        return as_typed(frozen_files.read_yaml(run_dir / "overrides.yaml"))
    except (OmegaConfBaseException, YAMLError, OSError, ValueError):
        return []


def as_typed(text: str) -> list[Any]:
    """What a YAML of words has: ``${run_dir}`` in one is no reference into that file."""
    words: list[Any] = OmegaConf.to_container(OmegaConf.create(text))  # type: ignore[assignment]
    return words


def results(run_dir: Path) -> dict[str, float]:
    """The last value of every metric; empty where the run has not finished.

    Raises:
        UserError: if it is damaged or edited.
    """
    try:
        found: dict[str, float] = json.loads(frozen_files.read_json(run_dir / "results.json"))
    except (OSError, ValueError):  # damaged, in a run of an older version
        return {}
    return found


def best_checkpoint(run_dir: Path) -> Path:
    """The checkpoint that a run has tested, or the last one of a run that kept no best.

    Raises:
        UserError: if there is none.
    """
    for name in ("best.ckpt", "last.ckpt"):
        if (path := run_dir / "checkpoints" / name).is_file():
            return path
    raise UserError(f"The run in {run_dir} has no checkpoint, which would hold its weights.")


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return any((folder / name).exists() for name in ("config.yaml", "overrides.yaml"))


def runs_in(parent: Path) -> list[Path]:
    """The runs in a folder, in the order in which they were started."""
    return sorted((path.parent.resolve() for path in parent.glob("*/overrides.yaml")), key=started)


def started(run_dir: Path) -> float:
    """When a run was started: as it has written itself, whatever the times of a copy's files."""
    path = run_dir / "overrides.yaml"
    with suppress(OSError, ValueError):
        text = path.read_text()
        if line := re.search(f"^{frozen_files.STARTED}(.+)$", text, re.MULTILINE):
            return datetime.fromisoformat(line[1]).timestamp()
    return path.stat().st_mtime


def config_of_checkpoint(checkpoint: Path) -> Path:
    """Where the config of the run that wrote ``checkpoint`` is.

    Raises:
        UserError: if the checkpoint or the config is missing.
    """
    if checkpoint.is_dir():  # of a run, of its checkpoints, or of several runs
        places = ("checkpoints/best.ckpt", "best.ckpt", "*/checkpoints/*", "*/*/checkpoints/*")
        found = [p for place in places for p in checkpoint.glob(place) if p.is_file()]
        best = [path for path in found if path.name == "best.ckpt"]
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
