"""The type of a config key: the values that it may take.

The rules of ``harness/src/harness/command/default_rules.yaml`` come first. Then the annotation of
the argument that gets the value, and the type of the default.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from template.site.yaml_keys import ROOT, Key

RULES = ROOT / "harness" / "src" / "harness" / "command" / "default_rules.yaml"
NAMES = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    types.NoneType: "null",
}
NAMES |= {list: "list", dict: "mapping", tuple: "list", timedelta: "duration", Path: "text"}
TEXTS = {"text": "text", "list": "list", "null": "null"}
# Keys without an argument of a class: the commands read them.
OF_COMMANDS = {
    **dict.fromkeys(("name", "run_dir", "sweep.storage"), "text or null"),
    **dict.fromkeys(("data", "model.scheduler"), "null"),
    "checkpoint": "text",
    "checkpoint.every_minutes": "number or null",
    "model.groups.lr_factors": "mapping or null",
    "model.scheduler_interval": "`step` or `epoch`",
}


def type_of(key: Key, same: Iterable[Key] = ()) -> str:
    """Return the values that a key may take, in plain English; "" if nothing tells them.

    Args:
        key: the key.
        same: the keys of other files that a command sets by the same path.
    """
    found = _type_of(key) or next(filter(None, map(_type_of, same)), "")
    is_null = key.value is None and found and "null" not in found
    return f"{found} or null" if is_null else found


def _type_of(key: Key) -> str:
    rules = yaml.safe_load(RULES.read_text())["takes"]
    for path in (key.path, key.refers_to):
        if path in rules:
            return join([of_rule(one) for one in rules[path]])
    target = key.target or ("harness.init.settings.Init" if key.path.startswith("init.") else "")
    hints = hints_of(target) if target else {}
    if key.name in hints and (found := join(of_hint(hints[key.name]))):
        return found
    if key.path in OF_COMMANDS:
        return OF_COMMANDS[key.path]
    return "" if key.value is None else NAMES.get(type(key.value), "")


def of_rule(value: object) -> str:
    """Return a rule in plain English: ``1..`` is "integer from 1"."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    text = str(value)
    if match := re.fullmatch(r"(-?[\d.]*\d)\.\.(-?[\d.]+)?", text):
        kind = "number" if "." in match[1] else "integer"
        return f"{kind} from {match[1]}" + (f" to {match[2]}" if match[2] else "")
    return text if text in TEXTS else f"`{text}`"


@cache
def hints_of(target: str) -> dict[str, Any]:
    """Return the annotations of a class's arguments, by name; {} if it is not installed."""
    module, _, name = target.rpartition(".")
    try:
        made: Any = getattr(import_module(module), name)
    except ImportError:  # of an extra
        return {}
    hints: dict[str, Any] = {}
    for one in reversed(inspect.getmro(made)) if inspect.isclass(made) else [made]:
        function = one.__dict__.get("__init__") if inspect.isclass(one) else one
        if isinstance(function, types.FunctionType):
            hints |= annotations(function)
    return hints


def annotations(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function; those that cannot be evaluated are left out."""
    try:
        return typing.get_type_hints(function)
    except NameError:  # of TYPE_CHECKING
        return {name: one for name, one in function.__annotations__.items() if name != "return"}


def of_hint(hint: Any) -> list[str]:
    """Return the kinds of values of an annotation; [] if it says nothing of values in YAML."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [part for one in arguments for part in of_hint(one)]
    if origin is typing.Literal:
        return [of_rule(one) if isinstance(one, bool) else f"`{one}`" for one in arguments]
    kind: Any = origin or hint
    if kind in NAMES:
        return [NAMES[kind]]
    if kind in (Mapping, MutableMapping):
        return ["mapping"]
    return ["list"] if kind in (Sequence, Iterable, Collection, set) else []


def join(parts: list[str]) -> str:
    """Return the parts as one phrase: "a, b or c"."""
    parts = [one for one in dict.fromkeys(parts) if one]
    if {"true", "false"} <= {*parts}:
        parts = ["true", "false", *(one for one in parts if one not in ("true", "false"))]
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} or {parts[-1]}"
