"""Choose a command's run, new or resumed, lock its folder, and write the config there.

In: a checked ``Command``. Out: the run's folder. Next: ``main`` computes the run. Only the first
process of a run chooses; the others get what it has chosen. A run that goes on keeps its saved
config but for what a command may change; any other word is refused with the difference.
"""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness import record
from harness.checkpoints import lookup
from harness.command import run_folder
from harness.command.check import check_init
from harness.command.compose import SET_BY, Command, key_of, refuse_trust_of_files
from harness.errors import UserError, print_text
from harness.names import few, flat, is_below, typed
from harness.processes.launcher import launcher
from harness.record import PENDING_CONFIG

MAX_TIME = "trainer.max_time"
NOT_COMPARED = ("resume", "run_dir", "output_dir", "name")


def choose(command: Command, locks: ExitStack) -> dict[str, Any]:
    """Choose a run's folder, lock it until ``locks`` are closed, and write the config there.

    Returns:
        ``run_dir``, as a text, and whether nothing of that run is left to do (``is_finished``).

    Raises:
        UserError: if the run to go on with is alive, or the command asks for another result.
    """
    cfg, parent = command.cfg, parent_of(command)
    if command.task != "train":
        lookup.verified(Path(cfg.checkpoint))
    is_auto = cfg.get("resume") == "auto" and not command.sweep_dir
    # Of two commands that start at once the second finds the run of the first.
    with run_folder.choosing(parent) if is_auto else nullcontext():
        found = find(command) if command.task == "train" else None
        if found is None and is_auto:
            print_text(f"There is no run in {parent} to go on with: a new one starts.")
            cfg.resume = None
            check_init(cfg)
        run_dir = found or Path(command.sweep_dir or run_folder.make(parent, launcher().job))
        run_dir.mkdir(parents=True, exist_ok=True)  # of a sweep
        locks.enter_context(run_folder.locked(run_dir))
        if found is None:
            run_folder.save_config(frozen(command, run_dir), run_dir)
            run_folder.save_words(command.overrides, run_dir)
    is_finished = found is not None and not _goes_on(command, run_dir)
    return {"run_dir": str(run_dir), "is_finished": is_finished}


def _goes_on(command: Command, run_dir: Path) -> bool:
    """Write the config with which a run goes on beside its own, unless nothing is left to do."""
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
    """Return the config with which this process computes a run, of which some keys may differ."""
    if (run_dir / PENDING_CONFIG).exists():
        config = resumed_config(command, run_dir)
        config.resume = run_folder.load_next_config(run_dir).resume
        return config
    if command.task == "train":
        command.cfg.resume = None  # it was auto, and there was no run
    return run_folder.freeze(command.cfg, run_dir)


def parent_of(command: Command) -> Path:
    """Return the folder in which a command's run has its own."""
    cfg = command.cfg
    if command.sweep_dir:
        return Path(command.sweep_dir).parent
    if command.task == "train":
        return Path(cfg.output_dir, cfg.name)
    trained = run_folder.config_of_checkpoint(Path(cfg.checkpoint)).parent
    return Path(cfg.output_dir or trained, command.task)


def find(command: Command) -> Path | None:
    """Find the run to go on with; ``None`` starts a new one.

    What torchrun or Slurm has started again goes on with the newest run of the same words, also
    without ``resume``. A job of Slurm's, or a task of an array, goes on with runs of its own.
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
        if run_folder.is_run(Path(named).parent.parent):  # a checkpoint in its folder
            example = str(Path(named).parent.parent)
        raise UserError(
            f"resume={named}: there is no run. Use resume=auto, or one such as {example}"
        )
    if cfg.resume == "auto":
        if (task := started_by.task) is not None:
            runs = [run for run in runs if re.fullmatch(rf"slurm_\d+_{task}(\.\d+)?", run.name)]
        return runs[-1] if runs else None
    if not started_by.may_be_restart or "resume=null" in command.overrides:
        return None
    words = _without_resume(command.overrides)
    runs = [run for run in runs if _without_resume(run_folder.load_words(run)) == words]
    if (job := started_by.job) is not None:
        runs = [run for run in runs if re.fullmatch(rf"{re.escape(job)}(\.\d+)?", run.name)]
    if runs:
        print_text(f"What has started this run has started it again: it goes on with {runs[-1]}.")
    return runs[-1] if runs else None


def _without_resume(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith("resume=")]


def resumed_config(command: Command, run_dir: Path) -> DictConfig:
    """Return the run's saved config with what the command may change; refuse any other word."""
    saved = run_folder.load_config(run_dir)
    composed = run_folder.freeze(command.cfg, run_dir)
    may_change, may_grow = command.rules["may_change"], command.rules["may_grow"]
    new, old = flat(composed), flat(saved)  # keys may have dots in them, as names of parts
    refused = []
    for key in _keys_asked_for(command.overrides, run_folder.load_words(run_dir), {*new, *old}):
        asked = new[key] if key in new else OmegaConf.select(composed, key)
        was = old[key] if key in old else OmegaConf.select(saved, key)
        if asked == was or is_below(key, NOT_COMPARED):
            continue
        if is_below(key, may_change) or (key in may_grow and is_more(asked, was)):
            _copy_value(composed, saved, key)
        else:
            refused.append(f"{key}={typed(asked)} (it has {typed(was)})")
    if refused:
        raise UserError(
            f"The run in {run_dir} would not go on as the same run with {few(refused)}.\n"
            "Leave that out to go on with it, or use resume=null to start another."
        )
    # The machines and processes of this start count, whether or not they were typed.
    _copy_value(composed, saved, "trainer.num_nodes")
    if launcher().name != "python":
        _copy_value(composed, saved, "trainer.devices")
    refuse_trust_of_files(saved, command.overrides, command.rules, f"the config of {run_dir}")
    return saved


def _keys_asked_for(words: list[str], first: list[str], keys: set[str]) -> list[str]:
    """List the keys that a command's words set, of those of both configs.

    An experiment among the words that first started the run asks for nothing: it is saved.
    """
    below: list[str] = []
    for word in words:
        name = key_of(word)
        if not (name in ("experiment", "debug") and word in first):
            below += SET_BY.get(name, (name.replace("/", "."),))
    # A strategy is exchanged as a whole: its settings are of no use to another.
    whole = "trainer.strategy"
    asked = [whole if is_below(key, [whole]) else key for key in keys if is_below(key, below)]
    return sorted({*asked})


def _copy_value(source: DictConfig, target: DictConfig, key: str) -> None:
    """Copy one value between configs, with its interpolations, or its absence."""
    parent, _, leaf = key.rpartition(".")
    new: Any = OmegaConf.select(source, parent) if parent else source
    old: Any = OmegaConf.select(target, parent) if parent else target
    if OmegaConf.is_dict(new) and leaf in new:
        value = OmegaConf.to_container(new)[leaf]  # type: ignore[call-overload,index]
        OmegaConf.update(target, key, value, merge=False, force_add=True)
    elif OmegaConf.is_dict(old):
        old.pop(leaf, None)


def is_more(asked: Any, was: Any) -> bool:
    """Return whether a limit allows more than another; -1 is no limit, null Lightning's choice."""
    return asked is not None and was not in (None, -1) and (asked == -1 or asked > was)


def newest_checkpoint(run_dir: Path, last_resume: str | None = None) -> str | None:
    """Return the newest whole checkpoint; ``None`` where the run was stopped before its first.

    A run that has had checkpoints, of which none is whole, is refused. ``last_resume`` is the one
    from which it has gone on before.
    """
    folder = run_dir / "checkpoints"
    if lookup.by_step(folder):
        # This takes torch, which will be needed in any case.
        from harness.checkpoints.reading import newest_whole

        path, skipped = newest_whole(folder)
        for line in skipped:
            print_text(line, sys.stderr)
        if path is not None:
            return str(path)
    # Metrics and best.ckpt are written before the first of them as well, and prove nothing.
    traces = [folder / lookup.NEWEST, *folder.glob("step_*"), run_dir / "results.json"]
    if last_resume is not None or any(os.path.lexists(trace) for trace in traces):
        raise UserError(
            f"The run in {run_dir} has had checkpoints, and none that is whole is left in "
            f"{folder}.\nBring one back from a copy, or use resume=null to start another run."
        )
    where = f"The run in {run_dir} was stopped before its first checkpoint"
    print_text(f"{where}: it begins anew at step 0.", sys.stderr)
    return None


def finished(run_dir: Path) -> str:
    """Say what came out of a run that has ended, and how to train on."""
    results = run_folder.results(run_dir)
    scores = ", ".join(f"{k} {v:.4f}" for k, v in results.items() if k.startswith("test/"))
    scores += " (of the last weights)" if "tested_last_weights" in results else ""
    said = f"The run in {run_dir} has finished{': ' if scores else ''}{scores}.\n"
    if early := record.read(run_dir).get("stopped_early"):
        more = f"Add {MAX_TIME}=<more> to train on, or use" if MAX_TIME in early else "Use"
        return f"{said}It was stopped early, {early}. {more} resume=null to start another."
    return f"{said}Add trainer.max_epochs=<more> to train on, or use resume=null to start another."
