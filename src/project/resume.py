"""Which run a command goes on with, and with which config. Mistakes are answered without torch.

The run's own saved config counts. What the command asks for besides is taken where it cannot
change the result, and refused where it would.
"""

import json
import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from project.checkpoints import files
from project.composition import compose
from project.errors import UserError

# Where a run is computed, how much of it, and what is shown: not what comes out.
FREE = (
    "checkpoint",
    "on_full_disk",
    "callbacks.progress_bar",
    "data.max_samples_per_device",
    "data.num_workers",
    "data.persistent_workers",
    "data.pin_memory",
    "data.prefetch_factor",
    "objective",
    "test",
    "trainer.accelerator",
    "trainer.accumulate_grad_batches",
    "trainer.devices",
    "trainer.enable_model_summary",
    "trainer.enable_progress_bar",
    "trainer.max_time",
    "trainer.num_nodes",
    "trainer.profiler",
    "trainer.strategy",
)
FREE_UPWARD = ("trainer.max_epochs", "trainer.max_steps")  # -1 has no end
NOT_COMPARED = ("resume", "run_dir", "output_dir", "name")
STRATEGY = ("trainer.accelerator", "trainer.devices", "trainer.strategy")  # the group's keys


def find(cfg: DictConfig, is_sweep: bool) -> Path | None:
    """The folder of the run to go on with; ``None`` starts a new one.

    Raises:
        UserError: if ``resume`` names no run.
    """
    if cfg.resume is None:
        return None
    if is_sweep:
        raise UserError(
            f"resume={cfg.resume} goes on with one run, and -m starts many.\nLeave out one of them."
        )
    runs = runs_in(Path(cfg.output_dir, cfg.name))
    if cfg.resume == "auto":
        return runs[-1] if runs else None
    run_dir = Path(cfg.resume)
    if not (run_dir / "config.yaml").is_file():
        hint = f"such as {runs[-1]}" if runs else "as <output_dir>/<name>/<date>_<time>"
        raise UserError(
            f"resume={cfg.resume}: there is no run, which would have a config.yaml.\n"
            f"Use resume=auto, or the folder of a run {hint}."
        )
    return run_dir.resolve()


def runs_in(parent: Path) -> list[Path]:
    """The runs in a folder, in the order in which they were started."""
    return sorted(
        (path.parent.resolve() for path in parent.glob("*/overrides.yaml")),
        key=lambda path: (path / "overrides.yaml").stat().st_mtime_ns,
    )


def config(cfg: DictConfig, overrides: list[str], run_dir: Path) -> DictConfig:
    """The run's own config, with what the command may change, and the checkpoint to go on from.

    Raises:
        UserError: if the command would change the result, or no whole checkpoint is left.
    """
    saved: Any = OmegaConf.load(run_dir / "config.yaml")
    composed: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    refused = []
    for key in sorted(asked_for(composed, saved, overrides)):
        asked, was = OmegaConf.select(composed, key), OmegaConf.select(saved, key)
        if asked == was or is_below(key, NOT_COMPARED):
            continue
        if is_below(key, FREE) or (key in FREE_UPWARD and is_more(asked, was)):
            # Not merged: a strategy's settings are of no use to another.
            OmegaConf.update(saved, key, asked, merge=False, force_add=True)
        else:
            refused.append(f"{key}={asked} (it has {was})")
    if refused:
        raise UserError(
            f"The run in {run_dir} would not go on as the same run with {', '.join(refused)}.\n"
            "Leave that out to go on with it, or leave out resume= to start another."
        )
    saved.run_dir = str(run_dir)
    saved.resume = checkpoint(run_dir)
    return saved  # type: ignore[no-any-return]


def checkpoint(run_dir: Path) -> str | None:
    """The newest whole checkpoint; ``None`` where the run was stopped before its first.

    Raises:
        UserError: if all of them are damaged.
    """
    folder = run_dir / "checkpoints"
    if not files.by_step(folder):
        return None
    # This takes torch, which will be needed in any case.
    from project.checkpoints.durable import unreadable

    path, skipped = files.newest_whole(folder, unreadable)
    for line in skipped:
        print(line, file=sys.stderr)
    if path is None:
        raise UserError(
            f"No checkpoint in {folder} is whole.\n"
            "Leave out resume= to start another run; this one can only begin anew."
        )
    return str(path)


def is_finished(cfg: DictConfig, run_dir: Path) -> bool:
    """Whether the run has ended, and the command asks for no more of it."""
    if not (run_dir / "results.json").exists():
        return False
    before: Any = OmegaConf.load(run_dir / "config.yaml")
    return all(OmegaConf.select(before, key) == OmegaConf.select(cfg, key) for key in FREE_UPWARD)


def finished(run_dir: Path) -> str:
    """What to say of a run that has ended."""
    results = json.loads((run_dir / "results.json").read_text())
    scores = ", ".join(f"{k} {v:.4f}" for k, v in results.items() if k.startswith("test/"))
    return (
        f"The run in {run_dir} has finished{': ' if scores else ''}{scores}.\n"
        "Add trainer.max_epochs=<more> to train on, or leave out resume= to start another."
    )


def asked_for(composed: DictConfig, saved: DictConfig, overrides: list[str]) -> set[str]:
    """The keys that the command's words set, down to single values and lists."""
    ours, theirs = flat(composed), flat(saved)
    keys: set[str] = set()
    for override in OverridesParser.create().parse_overrides(overrides):
        name = override.key_or_group
        if name == "strategy":
            keys |= {key for key in ours.keys() | theirs.keys() if is_below(key, STRATEGY)}
        elif name in ("experiment", "debug"):
            defaults = flat(compose("train", []))
            keys |= {key for key, value in ours.items() if defaults.get(key) != value}
        else:  # a value, all of a node, or a group, which fills the node of its name
            keys |= {key for key in ours.keys() | theirs.keys() if is_below(key, (name,))}
    return {"trainer.strategy" if is_below(key, ("trainer.strategy",)) else key for key in keys}


def flat(node: DictConfig, prefix: str = "") -> dict[str, Any]:
    """All values by their whole key."""
    values: dict[str, Any] = {}
    for key, child in node.items():
        if isinstance(child, DictConfig) and child:
            values |= flat(child, f"{prefix}{key!s}.")
        else:
            values[f"{prefix}{key!s}"] = child
    return values


def is_below(key: str, names: tuple[str, ...]) -> bool:
    """Whether a key is one of ``names`` or inside of one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def is_more(asked: Any, was: Any) -> bool:
    """Whether a limit allows more than another."""
    return bool(asked == -1 or (was != -1 and asked > was))
