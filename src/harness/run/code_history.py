"""The code that a run is trained with: kept with it, and compared when its checkpoints are used.

``code/step_<n>.zip`` in a run's folder holds what trains its steps after n, until the next one.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig

from harness import code_version
from harness.allowed import targets
from harness.checkpoints.reading import read
from harness.code_version import CodeVersion
from harness.errors import UserError
from harness.names import few
from harness.places import shown
from harness.processes.launch import global_rank

log = logging.getLogger(__name__)
FOLDER = "code"
NUM_SHOWN = 6  # files and versions of one message


class CodeHistory(pl.Callback):
    """Keep the code of a run, and refuse a checkpoint that other code than today's has written.

    What Lightning loads without a word is looked at: states of optimizers that would go to other
    parameters, and of schedulers that there are not.

    Args:
        cfg: the run's config.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.folder = Path(cfg.run_dir, FOLDER)
        self.targets = named(cfg)
        self.now = code_version.running(self.targets)
        self.loaded: dict[str, Any] | None = None
        self.groups: list[list[Any]] = []

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add what the optimizers' states lack: names of parameters, and what they began with."""
        checkpoint["optimized"] = optimized(trainer)
        checkpoint["optimizer_settings"] = optimizer_settings(trainer)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what is compared when all of it is loaded."""
        self.loaded = {
            "optimized": checkpoint.get("optimized"),  # older runs have none
            "settings": checkpoint.get("optimizer_settings"),
            "optimizers": len(checkpoint["optimizer_states"]),
            "schedulers": len(checkpoint["lr_schedulers"]),
            "groups": [shares(state["param_groups"]) for state in checkpoint["optimizer_states"]],
        }

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep how the code shares out parameters, which a checkpoint overrules."""
        self.groups = [shares(optimizer.param_groups) for optimizer in trainer.optimizers]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a state that went elsewhere; from here on the run trains with this code.

        Raises:
            UserError: if the checkpoint's state is that of other optimizers or schedulers.
        """
        path = Path(str(trainer.ckpt_path))
        if self.loaded is not None:
            reason = misfit(self.loaded, trainer) or other_groups(
                self.loaded["groups"], self.groups
            )
            if reason:
                raise UserError(refusal(path, reason, self.now))
        if self.loaded is not None and trainer.is_global_zero:
            tell_settings(self.loaded["settings"] or [], optimizer_settings(trainer))
        self.loaded = None
        if trainer.is_global_zero:
            try:
                self._keep(trainer.global_step)
            except OSError as error:
                log.warning("%s was not kept: %s.", shown(self.folder), error.strerror)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add modules that were imported while it trained: alone it must run without the rest."""
        path = trained_by(self.folder, None) if trainer.is_global_zero else None
        before = None if path is None else code_version.load(path)
        if path is None or before is None:
            return
        self.now = code_version.running(self.targets, self.now)
        if self.now.sources.keys() - before.sources.keys():
            with suppress(OSError):
                replace(before, sources=self.now.sources | before.sources).save(path)

    on_test_end = on_fit_end  # which may import more

    def _keep(self, step: int) -> None:
        """Write what trains the steps from here, unless it is what has trained those before."""
        self.now = code_version.running(self.targets, self.now)
        for start, path in history(self.folder):
            if start >= step:  # it has trained nothing that is left
                path.unlink()
        before = trained_by(self.folder, step)
        if before is None or not is_same(before, self.now):
            self.now.save(kept(self.folder, step))


@contextmanager
def telling_changes(cfg: DictConfig, checkpoint: str | Path | None) -> Iterator[None]:
    """Say what of the code has changed since a checkpoint was trained.

    Where the block raises a ``UserError`` that says it as well; else a warning does, to a run that
    goes on not a second time.

    Args:
        cfg: names what the block builds, so that its code is imported.
        checkpoint: is used then; without one nothing is said.
    """
    if checkpoint is None:
        yield
        return
    path = Path(checkpoint)
    try:
        yield
    except UserError as error:
        if said := change(path, code_version.running(named(cfg))):
            raise UserError(f"{error}\n{said}") from error
        raise
    now = code_version.running(named(cfg))
    told = kept(folder_of(path), step_of(path) or 0)
    is_told = cfg.get("resume") is not None and told.exists() and is_same(told, now)
    if global_rank() == 0 and not is_told and (said := change(path, now)):
        log.warning("%s\nToday's code is used; to be sure, stop, and go back to that.", said)


def refusal(checkpoint: Path, reason: str, now: CodeVersion) -> str:
    """Say that no run goes on from a checkpoint with this code, what has changed, what to do."""
    lines = [f"{shown(checkpoint)} does not fit what the code builds today: {reason}"]
    lines += [said] if (said := change(checkpoint, now)) else []
    lines += [
        "Go back to the code that trained it, or use resume=null to start another run: "
        "scripts/convert_checkpoint.py takes the weights along."
    ]
    return "\n".join(lines)


def change(checkpoint: Path, now: CodeVersion) -> str | None:
    """Say what has changed since a checkpoint was trained, and where the code of then is."""
    path = trained_by(folder_of(checkpoint), step_of(checkpoint))
    if path is None:
        return None  # older versions have kept none
    before = code_version.load(path)
    if before is None:
        return f"{shown(path)} is damaged: whether the code has changed is not known."
    changed = code_version.differences(before, now)
    if not changed:
        return None
    commit = f" (commit {before.commit[:10]})" if before.commit else ""
    return (
        f"The code has changed since {checkpoint.name} was trained: "
        f"{few(changed, NUM_SHOWN)}. What trained it is in {shown(path)}{commit}."
    )


def is_same(path: Path, now: CodeVersion) -> bool:
    """Whether nothing that counts has changed since a file was written; not if it is damaged."""
    before = code_version.load(path)
    return before is not None and not code_version.differences(before, now)


def named(cfg: DictConfig) -> list[str]:
    """What the config names."""
    return [str(node["_target_"]) for _, node in targets(cfg)]


def folder_of(checkpoint: Path) -> Path:
    """Where the code of a checkpoint's run is."""
    return checkpoint.resolve().parent.parent / FOLDER


def kept(folder: Path, step: int) -> Path:
    """The file of what trains the steps after this one."""
    return folder / f"step_{step}.zip"


def history(folder: Path) -> list[tuple[int, Path]]:
    """What has trained a run, with the steps at which it began, the latest last."""
    found = [(re.fullmatch(r"step_(\d+)\.zip", path.name), path) for path in folder.glob("*.zip")]
    return sorted((int(match[1]), path) for match, path in found if match)


def trained_by(folder: Path, step: int | None) -> Path | None:
    """What has trained a run up to a step, or up to its end; ``None`` where that is not known."""
    paths = [path for start, path in history(folder) if step is None or start < step]
    return paths[-1] if paths else None


def step_of(checkpoint: Path) -> int | None:
    """The step at which a checkpoint was written; ``None`` if it cannot be read."""
    try:
        return int(read(checkpoint, mmap=True)["global_step"])
    except (OSError, RuntimeError, UnpicklingError, KeyError, TypeError, ValueError):
        return None


def optimized(trainer: pl.Trainer) -> list[list[str]]:
    """The names of the parameters of each optimizer, in the order in which it knows them."""
    names = {id(p): name for name, p in trainer.lightning_module.named_parameters()}
    return [
        [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
        for optimizer in trainer.optimizers
    ]


def optimizer_settings(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """What each optimizer is built with, such as its learning rate: numbers and the like."""
    plain = (bool, int, float, str, type(None))
    return [
        {
            name: value
            for name, value in optimizer.defaults.items()
            if type(value) in plain and name in optimizer.param_groups[0]  # torch adds others later
        }
        for optimizer in trainer.optimizers
    ]


def tell_settings(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> None:
    """Say which settings of optimizers have no effect in a run that goes on."""
    changed = [
        f"{name}={one[name]} (now {other[name]})"
        for one, other in zip(before, now, strict=False)
        for name in one.keys() & other.keys()
        if one[name] != other[name]
    ]
    if changed:
        log.warning(
            "The optimizer goes on with the checkpoint's settings, and what it is built with now "
            "has no effect: %s.\nStart another run for other settings: use resume=null.",
            ", ".join(sorted(changed)),
        )


def shares(groups: list[dict[str, Any]]) -> list[Any]:
    """The names and factors of an optimizer's groups, where ``parameter_groups`` has made them."""
    return [(g.get("name"), g["lr_factor"]) if "lr_factor" in g else None for g in groups]


def other_groups(before: list[list[Any]], now: list[list[Any]]) -> str | None:
    """What of groups of the same sizes is not as it was."""
    for old, new in zip(before, now, strict=False):
        for one, other in zip(old, new, strict=False):
            if one != other:
                return f"its group of parameters {one} would be {other}."
    return None


def misfit(loaded: dict[str, Any], trainer: pl.Trainer) -> str | None:
    """What of the optimizers' and schedulers' states went elsewhere, or nowhere.

    Args:
        loaded: see ``CodeHistory.on_load_checkpoint``.
        trainer: has taken what it could.
    """
    counts = {"optimizers": len(trainer.optimizers)}
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
    # This one gives a scheduler of its own later.
    if not any(isinstance(c, pl.callbacks.StochasticWeightAveraging) for c in callbacks):
        counts["schedulers"] = len(trainer.lr_scheduler_configs)
    for kind, today in counts.items():
        if today != loaded[kind]:
            return f"it has {loaded[kind]} {kind}, and configure_optimizers gives {today}."
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            there = {*group, "differentiable"}  # which torch adds as any state is loaded
            if missing := [name for name in optimizer.defaults if name not in there]:
                return f"it has no {', '.join(missing)} for {type(optimizer).__name__}."
    known = {name for name, _ in trainer.lightning_module.named_parameters()}
    for before, today_names in zip(loaded["optimized"] or [], optimized(trainer), strict=False):
        for name, other in zip(before, today_names, strict=False):
            if name != other and name in known:  # else it was renamed as it was loaded
                return f"what an optimizer knows of {name} would go to {other}."
    return None
