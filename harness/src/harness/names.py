"""Names of settings, files and submodules, and their formats in messages and commands."""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_KEY = 4_096  # characters of a full key, such as trainer.strategy.find_unused_parameters
# Names that users type for the keys of configs.
MEANINGS = {"learning_rate": "lr", "epochs": "max_epochs", "steps": "max_steps"}
# Parts of the names of metrics to minimise, or to maximise.
DIRECTIONS = {"min": "loss|err|mae|mse|perplexity", "max": "acc|f1|auc|iou|dice|precision|recall"}


def direction(metric: str) -> str | None:
    """Return ``min`` or ``max``, the mode of a metric by its name, or ``None`` if unknown."""
    modes = [mode for mode, parts in DIRECTIONS.items() if re.search(parts, metric.lower())]
    return modes[0] if len(modes) == 1 else None


def flat(node: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dict by their dotted keys; a list counts as one value."""
    if len(prefix) > MAX_KEY:
        raise ValueError(f"a key has more than {MAX_KEY:,} characters: {prefix[:60]}...")
    values: dict[str, Any] = {}
    for key, child in node.items():
        if isinstance(child, Mapping) and child:  # a DictConfig as well
            values |= flat(child, f"{prefix}{key!s}.")
        else:
            values[f"{prefix}{key!s}"] = child
    return values


def leaf(key: str) -> str:
    """Return the last part of a dotted key."""
    return key.rpartition(".")[2]


def is_below(name: str, parts: Iterable[str]) -> bool:
    """Return whether a dotted name equals or is below one of ``parts``; all are below ``""``."""
    return any(not part or name == part or name.startswith(f"{part}.") for part in parts)


def few(items: Iterable[object], most: int = 5) -> str:
    """Return the first items, joined by commas, and the number of the other ones."""
    texts = [*map(str, items)]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return " Did you mean ...?" with a synonym or a similar name among ``names``, or ``""``."""
    candidates = list(names)
    synonyms = [candidate for candidate in candidates if candidate == MEANINGS.get(name)]
    close = synonyms or difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


def as_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name or a list of names, as a YAML file may have, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def typed(value: Any) -> str:
    """Return a value as a user types it in a command."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "null" if value is None else text[:60]


def shown(file: str | Path) -> str:
    """Return a path relative to the working directory, or the absolute path if it is outside."""
    path = os.path.relpath(file)
    return os.path.abspath(file) if path.startswith("..") else path


def program(module: str) -> str:
    """Return the command that the user typed: that of a script, or of ``module``."""
    is_script = not sys.argv[0].endswith("__main__.py")
    return f"python {sys.argv[0]}" if is_script else f"python -m {module}"
