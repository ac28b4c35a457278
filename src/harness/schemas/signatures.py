"""The schema of what a ``_target_`` takes: from its signature, its hints and its docstring."""

import ast
import inspect
import math
import os
import pydoc
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

from harness.run.targets import HYDRA_KEYS

Schema = dict[str, Any]

# A value that is known later: an interpolation, the command line's, what the data teaches.
REFERENCE: Schema = {"type": "string", "pattern": r"\$\{|^\?\?\?$|^from_data\."}
OBJECT: Schema = {"$ref": "#/definitions/object"}  # a mapping, whose _target_ says its keys
DEFAULTS: Schema = {"$ref": "#/definitions/defaults"}  # the choices at the head of a file
PLAIN = {NoneType: "null", bool: "boolean", int: "integer", float: "number", str: "string"}
ARRAYS = (list, tuple, set, Collection, Iterable, Sequence)
# The entries of "Args:" in Google's style, below which their further lines are indented deeper.
SECTION = re.compile(r"^(?:Args|Arguments):\s*\n((?:[ \t]+.*\n|\s*\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^(\w+)(?: ?\(.*?\))?:\s*(.*\n(?:[ \t]+.*\n|\s*\n)*)", re.MULTILINE)


def of_target(target: str) -> Schema | None:
    """The schema of a mapping with this target, or ``None`` where it cannot be imported.

    It is closed where no ``**kwargs`` takes more than what is named.
    """
    try:
        called: Any = pydoc.locate(target)
    except pydoc.ErrorDuringImport:
        return None
    if called is None:
        return None
    properties: dict[str, Schema] = {key: {} for key in sorted(HYDRA_KEYS)} | {"defaults": DEFAULTS}
    own, is_open = _arguments(called)
    return {"properties": properties | own, "additionalProperties": is_open}


def _arguments(called: Any) -> tuple[dict[str, Schema], bool]:
    """What a callable takes by name, and whether ``**kwargs`` take more.

    Those that a constructor hands on to its base class are the base class's.
    """
    made = called.__init__ if inspect.isclass(called) else called
    parameters: Mapping[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {}
    with suppress(NameError, TypeError, ValueError):  # hints for a type checker alone, written in C
        parameters = inspect.signature(called).parameters
        hints = get_type_hints(inspect.unwrap(made))
    texts = {**_described(inspect.getdoc(called)), **_described(inspect.getdoc(made))}
    taken: dict[str, Schema] = {}
    further: dict[str, Schema] = {}
    is_open = not parameters
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            base, given = _handed_on(called, name)
            further, is_open = _arguments(base) if base else ({}, True)
            further = {key: schema for key, schema in further.items() if key not in given}
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            hint, default = hints.get(name, Any), parameter.default
            taken[name] = or_reference(of_hint(Optional[hint] if default is None else hint))  # noqa: UP045
            if name in texts:
                taken[name]["description"] = texts[name]
            is_number = isinstance(default, float) and math.isfinite(default)  # as JSON has them
            if is_number or isinstance(default, bool | int | str):
                taken[name]["default"] = default
    return further | taken, is_open


def _handed_on(called: Any, kwargs: str) -> tuple[type | None, set[str]]:
    """The class whose constructor gets ``**kwargs`` and what it is given beside; else ``None``."""
    if not inspect.isclass(called) or "__init__" not in vars(called):
        return None, set()
    with suppress(OSError, SyntaxError, TypeError):  # no source
        tree = ast.parse(textwrap.dedent(inspect.getsource(called.__init__)))
        nodes = [*ast.walk(tree)]
        uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == kwargs]
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        calls = [node for node in calls if ast.unparse(node.func) == "super().__init__"]
        # Anything else that looks at them may take what the base class does not.
        if len(uses) == len(calls) == 1 and uses[0] in [one.value for one in calls[0].keywords]:
            bases = (base for base in called.__mro__[1:] if "__init__" in vars(base))
            return next(bases), {str(one.arg) for one in calls[0].keywords}
    return None, set()


def of_hint(hint: Any) -> Schema:
    """The schema of the values that a type hint takes; ``{}`` takes any."""
    arguments = get_args(hint)
    kind = get_origin(hint) or hint
    if kind is Annotated:
        return of_hint(arguments[0])
    if kind is Literal:
        is_plain = all(type(one) in PLAIN for one in arguments if one is not None)
        return {"enum": [*arguments]} if is_plain else {}
    if kind in (Union, UnionType):
        choices = [of_hint(argument) for argument in arguments]
        return {"anyOf": choices} if all(choices) else {}
    if kind in ARRAYS:
        is_uniform = len(arguments) == 1 or arguments[1:] == (...,)
        return {"type": "array", "items": or_reference(of_hint(arguments[0])) if is_uniform else {}}
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    if not isinstance(kind, type) or kind is object:
        return {}
    if issubclass(kind, Mapping):
        return {"type": "object"}
    return {"type": "string"} if issubclass(kind, os.PathLike) else dict(OBJECT)


def or_reference(schema: Schema) -> Schema:
    """The same, or a value that is known later."""
    return {"anyOf": [*schema.get("anyOf", [schema]), REFERENCE]} if schema else {}


def _described(docstring: str | None) -> dict[str, str]:
    """What a docstring says of each argument, in one line."""
    section = SECTION.search(f"{docstring}\n")
    entries = ENTRY.findall(inspect.cleandoc(section[1]) + "\n") if section else []
    # Sphinx's roles are noise in an editor: :class:`~torch.Tensor`.
    return {name: re.sub(r":\w+:`~?", "`", " ".join(text.split())) for name, text in entries}
