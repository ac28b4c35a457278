"""Decide with which config and checkpoint a run goes on. Mistakes are answered without torch.

In: a checked ``Command`` and a run's folder. Out: the run's saved config, with what the command may
change of it; any other difference is refused. ``which_run`` writes it beside the saved one.
"""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from harness import record
from harness.checkpoints import lookup
from harness.command import run_folder
from harness.command.compose import Command
from harness.errors import UserError
from harness.names import few, flat, is_below, typed
from harness.processes.launcher import launcher

NOT_COMPARED = ("resume", "run_dir", "output_dir", "name")
NUM_SHOWN = 3  # differences of one word
# Keys that a group sets elsewhere than below its own name; "" is every key.
SETS = {
    "strategy": ("trainer.accelerator", "trainer.devices", "trainer.strategy"),
    "watch": ("callbacks",),
    "experiment": ("",),
    "debug": ("",),
}


def config(command: Command, run_dir: Path) -> DictConfig:
    """The run's saved config, with what the command may change; any other word is refused."""
    saved = run_folder.load_config(run_dir)
    composed = run_folder.freeze(command.cfg, run_dir)
    may_change, may_grow = command.rules["may_change"], command.rules["may_grow"]
    refused: dict[str, list[str]] = {}
    new, old = flat(composed), flat(saved)  # keys may have dots in them, as names of parts
    for word, key in _asked_for(command.overrides, run_folder.load_words(run_dir), {*new, *old}):
        asked = new[key] if key in new else OmegaConf.select(composed, key)
        was = old[key] if key in old else OmegaConf.select(saved, key)
        if asked == was or is_below(key, NOT_COMPARED):
            continue
        if is_below(key, may_change) or (key in may_grow and is_more(key, asked, was)):
            _take(saved, composed, key)
        else:
            refused.setdefault(word, []).append(f"{key}={typed(asked)} (it has {typed(was)})")
    if refused:
        words = "; ".join(
            keys[0] if keys[0].startswith(f"{word} ") else f"{word}: {few(keys, NUM_SHOWN)}"
            for word, keys in refused.items()
        )
        raise UserError(
            f"The run in {run_dir} would not go on as the same run with {words}.\n"
            "Leave that out to go on with it, or use resume=null to start another."
        )
    # The machines and processes of this start count, whether or not they were typed.
    _take(saved, composed, "trainer.num_nodes")
    if launcher().name != "python":
        _take(saved, composed, "trainer.devices")
    return saved


def _asked_for(words: list[str], first: list[str], keys: set[str]) -> list[tuple[str, str]]:
    """Each word of a command with the keys that it sets, of those of both configs.

    An experiment among the words that first started the run asks for nothing: it is saved.
    """
    asked = []
    for override in OverridesParser.create().parse_overrides(words):
        name, word = override.key_or_group, str(override.input_line)
        if not (name in ("experiment", "debug") and word in first):
            below = SETS.get(name, (name.replace("/", "."),))
            asked += [(word, key) for key in sorted(keys) if is_below(key, below)]
    # A strategy is exchanged as a whole: its settings are of no use to another.
    whole = "trainer.strategy"
    return [(word, whole if is_below(key, (whole,)) else key) for word, key in asked]


def _take(saved: DictConfig, composed: DictConfig, key: str) -> None:
    """Let a saved config have the value of another one, as it is written there."""
    parent, _, leaf = key.rpartition(".")
    new: Any = OmegaConf.select(composed, parent) if parent else composed
    old: Any = OmegaConf.select(saved, parent) if parent else saved
    if OmegaConf.is_dict(new) and leaf in new:
        value = OmegaConf.to_container(new)[leaf]  # type: ignore[call-overload,index]
        OmegaConf.update(saved, key, value, merge=False, force_add=True)
    elif OmegaConf.is_dict(old):
        old.pop(leaf, None)


def is_more(key: str, asked: Any, was: Any) -> bool:
    """Whether a limit allows more than another."""

    def limit(value: Any) -> float:
        if value is None and key == "trainer.max_epochs":
            return 1000  # Lightning's own
        return math.inf if value in (None, -1) else value

    return limit(asked) > limit(was)


def checkpoint(run_dir: Path, last_resume: str | None = None) -> str | None:
    """The newest whole checkpoint; ``None`` where the run was stopped before its first.

    A run that has had checkpoints, of which none is whole, is refused. ``last_resume`` is the one
    from which it has gone on before.
    """
    folder, path = run_dir / "checkpoints", None
    if lookup.by_step(folder):
        # This takes torch, which will be needed in any case.
        from harness.checkpoints.reading import unreadable

        path, skipped = lookup.newest_whole(folder, unreadable)
        for line in skipped:
            print(line, file=sys.stderr)
    if path is not None:
        return str(path)
    # Metrics and best.ckpt are written before the first of them as well, and prove nothing.
    traces = [folder / lookup.NEWEST, *folder.glob("step_*"), run_dir / "results.json"]
    if last_resume is not None or any(os.path.lexists(trace) for trace in traces):
        raise UserError(
            f"The run in {run_dir} has had checkpoints, and none that is whole is left in "
            f"{folder}.\nBring one back from a copy, or use resume=null to start another run."
        )
    print(
        f"The run in {run_dir} was stopped before its first checkpoint: it begins anew at step 0.",
        file=sys.stderr,
    )
    return None


def is_finished(cfg: DictConfig, run_dir: Path, limits: Sequence[str]) -> bool:
    """Whether the run has ended, and the command asks for no more of it."""
    if not (run_dir / "results.json").exists():
        return False
    before = run_folder.load_config(run_dir)
    return all(OmegaConf.select(before, key) == OmegaConf.select(cfg, key) for key in limits)


def finished(run_dir: Path) -> str:
    """What to say of a run that has ended."""
    results = run_folder.results(run_dir)
    scores = ", ".join(f"{k} {v:.4f}" for k, v in results.items() if k.startswith("test/"))
    scores += " (of the last weights)" if "tested_last_weights" in results else ""
    said = f"The run in {run_dir} has finished{': ' if scores else ''}{scores}.\n"
    if early := record.read(run_dir).get("stopped_early"):
        return f"{said}It was stopped early, {early}. Use resume=null to start another."
    return f"{said}Add trainer.max_epochs=<more> to train on, or use resume=null to start another."
