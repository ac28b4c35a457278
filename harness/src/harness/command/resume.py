"""Which run a command goes on with, and with which config. Mistakes are answered without torch.

The run's own saved config counts. What the command asks for besides is taken where it cannot
change the result, and refused where it would.
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
from harness.names import few, flat, is_below
from harness.processes.launcher import launcher

NOT_COMPARED = ("resume", "run_dir", "output_dir", "name")
NUM_SHOWN = 3  # differences of one word
# Keys of groups that have other names.
FILLS = {
    "strategy": ("trainer.accelerator", "trainer.devices", "trainer.strategy"),
    "watch": ("callbacks",),
}


def config(command: Command, run_dir: Path) -> DictConfig:
    """The run's own config, with what the command may change.

    Raises:
        UserError: if the command would change the result.
    """
    saved = run_folder.load_config(run_dir)
    composed = run_folder.freeze(command.cfg, run_dir)
    may_change, may_grow = tuple(command.rules["may_change"]), command.rules["may_grow"]
    refused: dict[str, list[str]] = {}
    ours, theirs = flat(composed), flat(saved)  # keys may have dots in them, as names of parts
    for key, word in sorted(
        asked_for(command, composed, saved, run_folder.load_words(run_dir)).items()
    ):
        asked = ours[key] if key in ours else OmegaConf.select(composed, key)
        was = theirs[key] if key in theirs else OmegaConf.select(saved, key)
        if asked == was or is_below(key, NOT_COMPARED):
            continue
        if is_below(key, may_change) or (key in may_grow and is_more(key, asked, was)):
            take(saved, composed, key)
        else:
            refused.setdefault(word, []).append(f"{key}={shown(asked)} (it has {shown(was)})")
    if refused:
        words = "; ".join(difference(word, keys) for word, keys in refused.items())
        raise UserError(
            f"The run in {run_dir} would not go on as the same run with {words}.\n"
            "Leave that out to go on with it, or use resume=null to start another."
        )
    # Of this start, whether it was typed or not.
    take(saved, composed, "trainer.num_nodes")
    if launcher().name != "python":
        take(saved, composed, "trainer.devices")
    return saved


def difference(word: str, keys: list[str]) -> str:
    """One word of the command with what it would change; a group changes many keys."""
    return keys[0] if keys[0].startswith(f"{word} ") else f"{word}: {few(keys, NUM_SHOWN)}"


def shown(value: Any) -> str:
    """A value as a person types it; what is not there has none."""
    return "null" if value is None else f"{value!s:.60}"


def take(saved: DictConfig, composed: DictConfig, key: str) -> None:
    """Let a saved config have a value of another one, as it is written there."""
    parent, _, leaf = key.rpartition(".")
    ours: Any = OmegaConf.select(composed, parent) if parent else composed
    theirs: Any = OmegaConf.select(saved, parent) if parent else saved
    if OmegaConf.is_dict(ours) and leaf in ours:
        value = OmegaConf.to_container(ours)[leaf]  # type: ignore[call-overload,index]
        # Not merged: a strategy's settings are of no use to another.
        OmegaConf.update(saved, key, value, merge=False, force_add=True)
    elif OmegaConf.is_dict(theirs):
        theirs.pop(leaf, None)


def checkpoint(run_dir: Path, last_resume: str | None = None) -> str | None:
    """The newest whole checkpoint; ``None`` where the run was stopped before its first.

    Args:
        run_dir: of the run.
        last_resume: the checkpoint from which it has gone on before.

    Raises:
        UserError: if it has had checkpoints, and none of them is whole.
    """
    folder = run_dir / "checkpoints"
    path = None
    skipped: list[str] = []
    if lookup.by_step(folder):
        # This takes torch, which will be needed in any case.
        from harness.checkpoints.reading import unreadable

        path, skipped = lookup.newest_whole(folder, unreadable)
    # Metrics and best.ckpt are written before the first of them as well, and prove nothing.
    traces = [folder / lookup.NEWEST, *folder.glob("step_*"), run_dir / "results.json"]
    had_some = last_resume is not None or any(os.path.lexists(trace) for trace in traces)
    if path is None and not had_some:
        skipped.append(
            f"The run in {run_dir} was stopped before its first checkpoint: "
            "it begins anew at step 0."
        )
    if skipped:
        print(*skipped, sep="\n", file=sys.stderr)
    if path is None and had_some:
        raise UserError(
            f"The run in {run_dir} has had checkpoints, and none that is whole is left in "
            f"{folder}.\nBring one back from a copy, or use resume=null to start another run."
        )
    return None if path is None else str(path)


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


def asked_for(
    command: Command, composed: DictConfig, saved: DictConfig, first: list[str]
) -> dict[str, str]:
    """The keys that the command's words set, down to single values and lists, each with its word.

    Args:
        command: with its words.
        composed: what the command describes.
        saved: what the run is made of.
        first: the words with which the run was started; another experiment counts as a whole.
    """
    ours, theirs = flat(composed), flat(saved)
    may_change = (*command.rules["may_change"], *command.rules["may_grow"])
    every = ours.keys() | theirs.keys()
    keys: dict[str, str] = {}
    for override in OverridesParser.create().parse_overrides(command.overrides):
        name, word = override.key_or_group, str(override.input_line)
        if name in ("experiment", "debug"):
            defaults = flat(command.composed_with([]))
            mine = {key for key, value in ours.items() if defaults.get(key) != value}
            if word in first:  # the words beside it then need no second typing
                typed = tuple(text.lstrip("+~").partition("=")[0] for text in first)
                mine = {key for key in mine if not is_below(key, typed)}
            elif name == "experiment":
                # Another one: what it leaves as it is by default is part of it as well.
                mine |= {key for key in every if not is_below(key, may_change)}
        else:  # a value, all of a node, or a group, which fills the node of its name
            names = FILLS.get(name, (name.replace("/", "."),))
            mine = {key for key in every if is_below(key, names)}
        keys |= dict.fromkeys(mine, word)
    return {
        "trainer.strategy" if is_below(key, ("trainer.strategy",)) else key: word
        for key, word in keys.items()
    }


def is_more(key: str, asked: Any, was: Any) -> bool:
    """Whether a limit allows more than another."""

    def limit(value: Any) -> float:
        if value is None and key == "trainer.max_epochs":
            return 1000  # Lightning's own
        return math.inf if value in (None, -1) else value

    return limit(asked) > limit(was)
