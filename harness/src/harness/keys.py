"""Dotted keys: of a config, and of the parts of a module."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_KEY = 4_096  # characters of a full key, such as trainer.strategy.find_unused_parameters


def flatten(node: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dict by their dotted keys; a list counts as one value."""
    if len(prefix) > MAX_KEY:
        raise ValueError(f"a key has more than {MAX_KEY:,} characters: {prefix[:60]}...")
    values: dict[str, Any] = {}
    for key, child in node.items():
        if isinstance(child, Mapping) and child:  # a DictConfig as well
            values |= flatten(child, f"{prefix}{key!s}.")
        else:
            values[f"{prefix}{key!s}"] = child
    return values


def last_part(key: str) -> str:
    """Return the last part of a dotted key."""
    return key.rpartition(".")[2]


def is_within(name: str, parts: Iterable[str]) -> bool:
    """Return whether a dotted name equals or is below one of ``parts``; all are below ``""``."""
    return any(not part or name == part or name.startswith(f"{part}.") for part in parts)


def as_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return a name, or a list of names, as a tuple of names. A YAML file may have either."""
    return (value,) if isinstance(value, str) else tuple(value)
