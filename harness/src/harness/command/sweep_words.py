"""The words of a sweep: which jobs they make, and whether another sweep was started with them."""

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override

from harness.command import run_folder
from harness.command.explain import explained
from harness.errors import UserError

# What the same sweep may be typed with again: where it is, and how it is run.
MAY_CHANGE = (
    *("resume", "output_dir", "name"),
    *("sweep.num_parallel", "sweep.num_trials", "sweep.retry_failed"),
)


def key_of(word: str) -> str:
    """The key that a word sets."""
    return word.lstrip("+~").partition("=")[0]


def is_of_sweep(override: Override) -> bool:
    """Whether a word says how the sweep is run, and is none of its jobs'."""
    return override.key_or_group.partition(".")[0] == "sweep"


def parsed(conf: Path, words: Sequence[str]) -> list[Override]:
    """Words as Hydra reads them; ``glob(*)`` looks for the files of a group."""
    with explained("train", [*words], conf):
        with hydra.initialize_config_dir(str(conf), version_base="1.3"):
            parser = OverridesParser.create(GlobalHydra.instance().config_loader())
            overrides = parser.parse_overrides([*words])
            for override in overrides:  # while the files are within reach
                if override.is_discrete_sweep():
                    values_of(override)
        return overrides


def values_of(override: Override) -> list[str]:
    """All values of a word, as words; of an interval its start."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        return [f"{key}={value.start}"]
    texts = [*override.sweep_string_iterator()]
    if isinstance(value, Glob):  # such files are parts of others
        texts = [text for text in texts if not text.startswith("_")]
    return [f"{key}={text}" for text in texts]


def combinations(overrides: Sequence[Override]) -> list[list[str]]:
    """The words of each job, in Hydra's order; a job that is asked for twice is one.

    Raises:
        UserError: for an interval.
    """
    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise UserError(
                f"{override.input_line} has no end of values.\n"
                "Name some (0.001,0.01), or let Optuna choose: sweep=optuna."
            )
    kept = [override for override in overrides if not is_of_sweep(override)]
    return [list(words) for words in dict.fromkeys(itertools.product(*map(values_of, kept)))]


def found(parent: Path, words: Sequence[str]) -> Path | None:
    """The newest sweep of a name that was started with these words; ``None`` if there is no sweep.

    Raises:
        UserError: if there are others only.
    """
    sweeps = run_folder.runs_in(parent)
    same = [folder for folder in sweeps if lasting(run_folder.load_words(folder)) == lasting(words)]
    if same:
        return same[-1]
    if not sweeps:
        print(f"There is no sweep in {parent} to go on with: a new one starts.")
        return None
    raise UserError(another(sweeps[-1], words))


def another(folder: Path, words: Sequence[str]) -> str:
    """Say that a sweep was started with other words."""
    first, now = lasting(run_folder.load_words(folder)), lasting(words)
    theirs, ours = ([w for w in a if w not in b] for a, b in ((first, now), (now, first)))
    return (
        f"The sweep in {folder} is another one: it has {shlex.join(theirs) or 'fewer words'}, and "
        f"this command {shlex.join(ours) or 'fewer words'}.\nUse resume={folder} and no words of "
        "settings to go on with it, or leave out resume to start another."
    )


def lasting(words: Sequence[str]) -> list[str]:
    """The words that a sweep is made of."""
    return [word for word in words if key_of(word) not in MAY_CHANGE]


def words_of(folder: Path, words: list[str]) -> list[str]:
    """The words of a sweep that is named by its folder, with what is typed besides.

    Raises:
        UserError: if it is no sweep's folder, or the sweep of other words.
    """
    if not (folder / "overrides.yaml").is_file() or (folder / "config.yaml").exists():
        raise UserError(
            f"resume={folder}: there is no sweep.\n"
            "Use resume=auto, or the folder of a sweep, <output_dir>/sweeps/<name>/<date>_<time>."
        )
    first = run_folder.load_words(folder)
    if not lasting(words):
        given = {key_of(word) for word in words}
        return [*(word for word in first if key_of(word) not in given), *words]
    if lasting(first) != lasting(words):
        raise UserError(another(folder, words))
    return words
