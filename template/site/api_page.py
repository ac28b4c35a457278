"""Write the page of the Python interface: the public names of ``harness``, from their docstrings.

The docstring of ``harness`` groups the names. The classes of the library that config files name
follow.
"""

import ast
import inspect
import re
from textwrap import dedent
from typing import Any

import harness
from template.site.config_keys import read_all
from template.site.key_types import imported
from template.site.markdown import fenced, inline

CLASSES = """## Classes that a config file names

A config file names these as `_target_`. Their arguments are config keys: see [config
keys](config.md).
"""
TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Raises"}  # of lists


def write() -> str:
    """Return the page."""
    parts, names = [], set(harness.__all__)
    for block in re.split(r"\n\n(?=[A-Z][\w ]*:\n)", harness.__doc__ or "")[1:]:
        parts.append(f"## {block.partition(':')[0]}\n")
        places = {name: block.find(f"``{name}``") for name in names}
        found = sorted((name for name in names if places[name] >= 0), key=places.__getitem__)
        parts += [section(f"harness.{name}", getattr(harness, name)) for name in found]
        names -= {*found}
    if names:
        raise SystemExit(f"Describe {', '.join(names)} in the docstring of harness/__init__.py.")
    parts.append(CLASSES)
    files = read_all().values()
    targets = {key.target for file in files for key in file.keys} | {one.target for one in files}
    for target in sorted(one for one in targets if one.startswith("harness.")):
        parts.append(section(target, imported(target), with_methods=False))
    return "\n".join(parts)


def section(full_name: str, made: Any, with_methods: bool = True) -> str:
    """Return heading, signature and docstring of a name, and those of a class's methods."""
    node = ast.parse(inspect.getsource(made)).body[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    parts = [f"### `{full_name}`\n", signature(node), described(node)]
    if not isinstance(node, ast.ClassDef):
        return "\n".join(parts)
    if node.bases:
        parts.append(f"Base: {', '.join(f'`{ast.unparse(base)}`' for base in node.bases)}.\n")
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and with_methods]
    for method in methods:
        is_hook = method.name.startswith("on_")  # of Lightning
        if method.name[0] != "_" and not is_hook and ast.get_docstring(method):
            is_property = any("property" in ast.unparse(one) for one in method.decorator_list)
            parts.append(f"#### `{node.name}.{method.name}`\n")
            parts += [described(method)] if is_property else [signature(method), described(method)]
    return "\n".join(parts)


def signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return the signature as a block of code; for a class that of its ``__init__``."""
    head, arguments, returns = f"def {node.name}", "", ""
    if isinstance(node, ast.ClassDef):
        head = f"class {node.name}"
        functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        inits = [one.args for one in functions if one.name == "__init__"]
        is_dataclass = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and is_dataclass]
        arguments = ", ".join(map(ast.unparse, inits or fields))
    else:
        arguments = ast.unparse(node.args)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = re.sub(r"^self(, |$)", "", arguments)
    arguments = re.sub(r" ?= ?", " = ", arguments)
    text = f"{head}({arguments}){returns}" if arguments or returns else head
    if len(text) > 88:  # one argument per line
        lines = re.sub(r", (?=\*|\w+: )", ",\n    ", arguments)
        text = f"{head}(\n    {lines},\n){returns}"
    return fenced(text.replace("'", '"'), "python")


def described(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return a docstring as Markdown: sections as lists, blocks after ``::`` as code."""
    parts = []
    for block in re.split(r"\n\n+(?=\S)", ast.get_docstring(node) or ""):
        title, _, rest = block.partition(":\n")
        text, colons, example = block.partition("::\n\n")
        if title in TITLES:
            parts.append(f"**{TITLES[title]}:**\n")
            parts.append("\n".join(map(entry, re.split(r"\n(?=\S)", dedent(rest)))) + "\n")
        elif title in ("Returns", "Yields"):
            parts.append(f"**{title}:** {inline(rest)}\n")
        else:
            items = map(inline, re.split(r"\n(?=- )", text))
            parts.append("\n".join(items) + (":\n" if colons else "\n"))
            parts += [fenced(dedent(example), "python")] if colons else []
    return "\n".join(parts)


def entry(text: str) -> str:
    """Return an entry such as ``lr: the rate`` as an item of a list."""
    name, _, rest = text.partition(":")
    names = ", ".join(f"`{one.strip()}`" for one in name.split(","))
    return f"- {names}: {inline(rest)}"
