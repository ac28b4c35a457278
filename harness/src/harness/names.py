"""Names of settings, files and parts of a module, and how they look in a sentence or a command."""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_KEY = 4_096  # characters of a key with those that it is below
# Words that are typed for keys with other names.
MEANINGS = {"learning_rate": "lr", "epochs": "max_epochs", "steps": "max_steps"}
# Parts of the names of scores whose best value is the smallest, or the largest.
DIRECTIONS = {"min": "loss|err|mae|mse|perplexity", "max": "acc|f1|auc|iou|dice|precision|recall"}


def direction(score: str) -> str | None:
    """Return whether a score is best at its ``min`` or ``max``, where its name says so."""
    modes = [mode for mode, parts in DIRECTIONS.items() if re.search(parts, score.lower())]
    return modes[0] if len(modes) == 1 else None


def flat(node: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return all values of nested settings by their full keys; a list is one value."""
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
    """Return the last part of a key."""
    return key.rpartition(".")[2]


def is_below(name: str, parts: Iterable[str]) -> bool:
    """Return whether a name is one of the parts, or inside of one; ``""`` contains all."""
    return any(not part or name == part or name.startswith(f"{part}.") for part in parts)


def few(items: Iterable[object], most: int = 5) -> str:
    """List the first of many items, and count the rest."""
    texts = [*map(str, items)]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Suggest another word for a name, or the most similar of some names, if there is one."""
    candidates = list(names)
    same = [word for word in candidates if word == MEANINGS.get(name)]
    close = same or difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


def as_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return names as a tuple; a YAML file may give a list or one name."""
    return (value,) if isinstance(value, str) else tuple(value)


def typed(value: Any) -> str:
    """Format a value as a user types it in a command."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "null" if value is None else text[:60]


def shown(file: str | Path) -> str:
    """Format a path relative to the working directory, if it is below."""
    path = os.path.relpath(file)
    return os.path.abspath(file) if path.startswith("..") else path


def program(module: str) -> str:
    """Return the command that was typed for a module: a script, or the module itself."""
    is_script = not sys.argv[0].endswith("__main__.py")
    return f"python {sys.argv[0]}" if is_script else f"python -m {module}"
