"""The type of a config key: the values that it may take.

The rules of ``harness/src/harness/command/default_rules.yaml`` come first. Then the annotation of
the argument that gets the value, and the type of the default.
"""

import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from template.site.config_keys import Key
from template.site.markdown import ROOT

RULES = ROOT / "harness" / "src" / "harness" / "command" / "default_rules.yaml"
TAKES = yaml.safe_load(RULES.read_text())["takes"]
NAMES: dict[Any, tuple[str, ...]] = {
    bool: ("true", "false"),
    int: ("integer",),
    float: ("number",),
    timedelta: ("duration",),
    types.NoneType: ("null",),
    **dict.fromkeys((str, Path), ("text",)),
    **dict.fromkeys((list, tuple, set, Sequence, Iterable, Collection), ("list",)),
    **dict.fromkeys((dict, Mapping, MutableMapping), ("mapping",)),
}
# Keys that the commands read, so that no argument of a class has an annotation.
OF_COMMANDS = {
    **dict.fromkeys(("name", "run_dir", "sweep.storage"), ("text", "null")),
    "checkpoint.every_minutes": ("number", "null"),
    "model.groups.lr_factors": ("mapping", "null"),
    "model.scheduler_interval": ("`step`", "`epoch`"),
}


def type_of(key: Key, same: Iterable[Key] = ()) -> str:
    """Return the values that a key may take, in plain English; ``same`` is it in other files."""
    value = yaml.safe_load(re.sub(r"&\w+ |\*", "", key.default))
    found = next(filter(None, map(known, (key, *same))), NAMES[type(value)])
    parts = [*dict.fromkeys(found + NAMES[type(None)] * (value is None))]
    return " or ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def known(key: Key) -> tuple[str, ...]:
    """Return the values that a rule or an annotation names; () if there is neither."""
    for path in (key.path, key.refers_to):
        if path in TAKES:
            return tuple(map(of_rule, TAKES[path]))
    target = "harness.init.settings.Init" if key.path.startswith("init.") else key.target
    return of_hint(hints_of(target).get(key.name)) or OF_COMMANDS.get(key.path, ())


def of_rule(value: object) -> str:
    """Return a rule in plain English: ``1..`` is "integer from 1"."""
    text = "null" if value is None else str(value)
    start, dots, end = text.partition("..")
    if dots:
        kind = "number" if "." in start else "integer"
        return f"{kind} from {start} to {end}" if end else f"{kind} from {start}"
    return text.lower() if text in ("text", "list", "null", "True", "False") else f"`{text}`"


def of_hint(hint: Any) -> tuple[str, ...]:
    """Return the kinds of values of an annotation; () if it says nothing of values in YAML."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(part for one in arguments for part in of_hint(one))
    if origin is typing.Literal:
        return tuple(map(of_rule, arguments))
    return NAMES.get(origin or hint, ())


@cache
def hints_of(target: str) -> dict[str, Any]:
    """Return the annotations of a class's arguments, by name; {} if it is not installed."""
    made = imported(target)
    classes = made.__mro__[::-1] if isinstance(made, type) else ()
    hints: dict[str, Any] = {}
    for function in [vars(one).get("__init__") for one in classes] or [made]:
        hints |= getattr(function, "__annotations__", {})
        with suppress(NameError, TypeError):  # a name of TYPE_CHECKING; no function
            hints |= typing.get_type_hints(function)
    return hints


def imported(target: str) -> Any:
    """Return the class or function of a ``_target_``; None if it needs an extra."""
    module, _, name = target.rpartition(".")
    with suppress(ImportError, ValueError):
        return getattr(import_module(module), name)
