"""Choose a command's run, new or resumed, lock its folder, and write the config there.

In: a checked ``Command``. Out: the run's folder. Next: ``main`` computes the run. Only rank 0
chooses; the other ranks get its choice. A resumed run keeps its saved config, except for the keys
that a command may change. Any other override raises a ``UserError`` with the difference.
"""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness import provenance
from harness.checkpoints import lookup
from harness.command import run_folder
from harness.command.check import check_init
from harness.command.compose import SET_BY, Command, key_of, refuse_trust_of_files
from harness.display import display_path, format_override, join_first
from harness.distributed.launcher import launcher
from harness.errors import UserError, print_text
from harness.keys import flatten, is_within
from harness.provenance import PENDING_CONFIG

MAX_TIME = "trainer.max_time"
# A command that resumes a run may have other values of these keys.
NOT_COMPARED = ("resume", "run_dir", "output_dir", "name")


def choose(command: Command, locks: ExitStack) -> dict[str, Any]:
    """Choose a run's folder, lock it until ``locks`` are closed, and write the config there.

    Returns:
        ``run_dir``, a string, and ``is_finished``: whether that run has nothing left to do.

    Raises:
        UserError: if the run to resume is still running, or an override would change its result.
    """
    cfg, parent = command.cfg, parent_of(command)
    if command.task != "train":
        lookup.verified(Path(cfg.checkpoint))
    is_auto = cfg.get("resume") == "auto" and not command.sweep_dir
    # If two commands start at once, the second one finds the run of the first.
    with run_folder.choosing(parent) if is_auto else nullcontext():
        found = find(command) if command.task == "train" else None
        if found is None and is_auto:
            print_text(f"There is no run in {parent} to resume: a new run starts.")
            cfg.resume = None
            check_init(cfg)
        run_dir = found or Path(command.sweep_dir or run_folder.make(parent, launcher().job))
        run_dir.mkdir(parents=True, exist_ok=True)  # for a job of a sweep
        locks.enter_context(run_folder.locked(run_dir))
        if found is None:
            run_folder.save_config(frozen(command, run_dir), run_dir)
            run_folder.save_overrides(command.overrides, run_dir)
    is_finished = found is not None and not _prepare_resume(command, run_dir)
    return {"run_dir": str(run_dir), "is_finished": is_finished}


def _prepare_resume(command: Command, run_dir: Path) -> bool:
    """Write the config of the resumed run next to its old one, unless the run is finished.

    Returns:
        Whether the run has anything left to do.
    """
    config, saved = resumed_config(command, run_dir), run_folder.load_config(run_dir)
    if (run_dir / "results.json").exists() and all(
        OmegaConf.select(saved, key) == OmegaConf.select(config, key)
        for key in (*command.rules["may_grow"], MAX_TIME)
    ):
        print_text(finished(run_dir))
        return False
    config.resume = newest_checkpoint(run_dir, config.get("resume"))
    run_folder.save_config(config, run_dir, PENDING_CONFIG)
    return True


def frozen(command: Command, run_dir: Path) -> DictConfig:
    """Return this process's config of a run; some keys may differ between processes."""
    if (run_dir / PENDING_CONFIG).exists():
        config = resumed_config(command, run_dir)
        config.resume = run_folder.load_current_config(run_dir).resume
        return config
    if command.task == "train":
        command.cfg.resume = None  # resume=auto has found no run
    return run_folder.freeze(command.cfg, run_dir)


def parent_of(command: Command) -> Path:
    """Return the folder that contains the folders of a command's runs."""
    cfg = command.cfg
    if command.sweep_dir:
        return Path(command.sweep_dir).parent
    if command.task == "train":
        return Path(cfg.output_dir, cfg.name)
    trained = run_folder.config_of_checkpoint(Path(cfg.checkpoint)).parent
    return Path(cfg.output_dir or trained, command.task)


def find(command: Command) -> Path | None:
    """Return the folder of the run to resume, or ``None`` to start a new run.

    After a restart by torchrun or Slurm, this is the newest run with the same overrides, even
    without ``resume``. A Slurm job, or a task of a job array, resumes only its own runs.
    """
    cfg, started_by = command.cfg, launcher()
    named = command.sweep_dir or (cfg.resume if cfg.resume != "auto" else None)
    if named and run_folder.is_run(Path(named)):
        return Path(named).resolve()
    if command.sweep_dir:
        return None
    runs = run_folder.runs_in(parent_of(command))
    if named:
        example = max(map(str, runs), default="<output_dir>/<name>/<run>")
        if run_folder.is_run(Path(named).parent.parent):  # the user named a checkpoint
            example = str(Path(named).parent.parent)
        elif Path(named).is_file():
            raise UserError(
                f"resume={named} is a file, and not the folder of a run.\nUse init={named} to "
                "start a run from its weights."
            )
        raise UserError(
            f"resume={named} is not a run. Use resume=auto, or name a run: resume={example}"
        )
    if cfg.resume == "auto":
        if (task := started_by.task) is not None:
            runs = [run for run in runs if re.fullmatch(rf"slurm_\d+_{task}(\.\d+)?", run.name)]
        return runs[-1] if runs else None
    if not started_by.may_be_restart or "resume=null" in command.overrides:
        return None
    overrides = _without_resume(command.overrides)
    runs = [run for run in runs if _without_resume(run_folder.load_overrides(run)) == overrides]
    if (job := started_by.job) is not None:
        runs = [run for run in runs if re.fullmatch(rf"{re.escape(job)}(\.\d+)?", run.name)]
    if runs:
        print_text(f"This command was restarted: it resumes {runs[-1]}.")
    return runs[-1] if runs else None


def _without_resume(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if not override.startswith("resume=")]


def resumed_config(command: Command, run_dir: Path) -> DictConfig:
    """Return the run's saved config with the changes that a command may make.

    Raises:
        UserError: if an override would change anything else.
    """
    saved = run_folder.load_config(run_dir)
    composed = run_folder.freeze(command.cfg, run_dir)
    may_change, may_grow = command.rules["may_change"], command.rules["may_grow"]
    # Keys may contain dots, such as names of submodules.
    new, old = flatten(composed), flatten(saved)
    refused = []
    for key in _overridden_keys(
        command.overrides, run_folder.load_overrides(run_dir), {*new, *old}
    ):
        new_value = new[key] if key in new else OmegaConf.select(composed, key)
        old_value = old[key] if key in old else OmegaConf.select(saved, key)
        if new_value == old_value or is_within(key, NOT_COMPARED):
            continue
        if is_within(key, may_change) or (key in may_grow and is_higher(new_value, old_value)):
            _copy_value(composed, saved, key)
        else:
            refused.append(
                f"{key}={format_override(new_value)} (the run has {format_override(old_value)})"
            )
    if refused:
        raise UserError(
            f"The run in {run_dir} cannot be resumed with {join_first(refused)}.\nLeave out these "
            "overrides to resume the run. To start another run from its weights, type "
            f"init={display_path(run_dir)} in place of resume."
        )
    # The numbers of machines and processes come from this command, with or without an override.
    _copy_value(composed, saved, "trainer.num_nodes")
    if launcher().name != "python":
        _copy_value(composed, saved, "trainer.devices")
    refuse_trust_of_files(saved, command.overrides, command.rules, f"the config of {run_dir}")
    return saved


def _overridden_keys(overrides: list[str], first: list[str], keys: set[str]) -> list[str]:
    """Return those of ``keys`` that a command's overrides set.

    An experiment that the run's ``first`` overrides chose as well is skipped: the saved config has
    its values.
    """
    parents: list[str] = []
    for override in overrides:
        name = key_of(override)
        if not (name in ("experiment", "debug") and override in first):
            parents += SET_BY.get(name, (name.replace("/", "."),))
    # A strategy is replaced as a whole, because another strategy has other settings.
    whole = "trainer.strategy"
    found = [whole if is_within(key, [whole]) else key for key in keys if is_within(key, parents)]
    return sorted({*found})


def _copy_value(source: DictConfig, target: DictConfig, key: str) -> None:
    """Copy the value of a key with its interpolations, or remove the key if ``source`` lacks it."""
    parent, _, leaf = key.rpartition(".")
    new: Any = OmegaConf.select(source, parent) if parent else source
    old: Any = OmegaConf.select(target, parent) if parent else target
    if OmegaConf.is_dict(new) and leaf in new:
        value = OmegaConf.to_container(new)[leaf]  # type: ignore[call-overload,index]
        OmegaConf.update(target, key, value, merge=False, force_add=True)
    elif OmegaConf.is_dict(old):
        old.pop(leaf, None)


def is_higher(new: Any, old: Any) -> bool:
    """Return whether a limit is higher than the old one; -1 means no limit, ``None`` a default."""
    return new is not None and old not in (None, -1) and (new == -1 or new > old)


def newest_checkpoint(run_dir: Path, last_resume: str | None = None) -> str | None:
    """Return the newest complete checkpoint, or ``None`` if the run has never saved one.

    ``last_resume`` is the checkpoint from which the run resumed before.

    Raises:
        UserError: if the run has had checkpoints, but none of them is complete.
    """
    folder = run_dir / "checkpoints"
    if lookup.by_step(folder):
        # This imports torch, which the run needs in any case.
        from harness.checkpoints.reading import newest_intact

        path, skipped = newest_intact(folder)
        for line in skipped:
            print_text(line, sys.stderr)
        if path is not None:
            return str(path)
    # Ignore metrics and best.ckpt, because they may be written before the first checkpoint.
    traces = [folder / lookup.NEWEST, *folder.glob("step_*"), run_dir / "results.json"]
    if last_resume is not None or any(os.path.lexists(trace) for trace in traces):
        raise UserError(
            f"The run in {run_dir} has saved checkpoints, but {folder} has no complete "
            "checkpoint.\nRestore a checkpoint from a backup, or use resume=null to start "
            "another run."
        )
    where = f"The run in {run_dir} was stopped before its first checkpoint"
    print_text(f"{where}: it starts again at step 0.", sys.stderr)
    return None


def finished(run_dir: Path) -> str:
    """Return a text with the results of a finished run, and how to continue its training."""
    results = run_folder.results(run_dir)
    metrics = ", ".join(f"{k} {v:.4f}" for k, v in results.items() if k.startswith("test/"))
    metrics += " (of the last weights)" if "tested_last_weights" in results else ""
    text = f"The run in {run_dir} has finished{': ' if metrics else ''}{metrics}.\n"
    if early := provenance.read(run_dir).get("stopped_early"):
        more = f"Add {MAX_TIME}=<more> to train on, or use" if MAX_TIME in early else "Use"
        return f"{text}It was stopped early, {early}. {more} resume=null to start another."
    return f"{text}Add trainer.max_epochs=<more> to train on, or use resume=null to start another."
