"""Names of settings and of a module's parts, and how they stand in a sentence or a command."""

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def flat(node: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """All values of a tree of settings by their whole keys; a list is one value."""
    values: dict[str, Any] = {}
    for key, child in node.items():
        if isinstance(child, Mapping) and child:  # a DictConfig as well
            values |= flat(child, f"{prefix}{key!s}.")
        else:
            values[f"{prefix}{key!s}"] = child
    return values


def is_below(name: str, parts: Iterable[str]) -> bool:
    """Whether a name is one of the parts, or belongs to one; ``""`` is the whole."""
    return any(not part or name == part or name.startswith(f"{part}.") for part in parts)


def few(items: Iterable[object], most: int = 5) -> str:
    """List the first of many items, and how many more there are."""
    texts = [*map(str, items)]
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Ask for the nearest of some names, if one is near."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


def as_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Names as a YAML file gives them: a list, or one by itself."""
    return (value,) if isinstance(value, str) else tuple(value)


def typed(value: Any) -> str:
    """A value as a person types it in a command."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "null" if value is None else text[:60]


def program(module: str) -> str:
    """The command that a person has typed for a module: a script of the project, or itself."""
    is_script = not sys.argv[0].endswith("__main__.py")
    return f"python {sys.argv[0]}" if is_script else f"python -m {module}"
