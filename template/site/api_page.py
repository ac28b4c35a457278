"""Write the page of the Python interface: the public names of ``harness``, from their docstrings.

In: ``harness/__init__.py``, whose docstring groups the names, and the classes of the library that
config files name. Out: Markdown. The sources are parsed, not imported.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from template.site.yaml_keys import ROOT, read_all

SOURCE = ROOT / "harness" / "src"
HEAD = """# Python interface

This page has the public names of `harness`, from their docstrings. Everything else is internal,
and may change in any release.

```python
from harness import train

run = train("model=mlp", "trainer.max_epochs=3") run.results["test/accuracy"] ```

Names are imported on first use: `from harness import main` does not import torch.
"""
CLASSES = """## Classes that a config file names

A config file names these as `_target_`. Their arguments are config keys: see [config
keys](config.md).
"""
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")


@dataclass
class Definition:
    """A class or a function, and the lines of its file."""

    node: ast.ClassDef | ast.FunctionDef
    text: str
    path: Path


def write() -> str:
    """Return the page."""
    face = ast.parse((SOURCE / "harness" / "__init__.py").read_text())
    parts = [HEAD]
    modules = modules_of(face)
    described = [*groups(ast.get_docstring(face) or "")]
    described[0][1].extend(
        sorted(modules.keys() - {one for _, names in described for one in names})
    )
    for title, names in described:
        parts.append(f"## {title}\n")
        parts += [section(f"harness.{name}", modules[name], name) for name in names]
    parts.append(CLASSES)
    targets = {key.target for file in read_all() for key in file.keys}
    targets |= {file.target for file in read_all()}
    for target in sorted(targets):
        module, _, name = target.rpartition(".")
        if module.startswith("harness."):
            parts.append(section(target, module, name, with_methods=False))
    return "\n".join(parts)


def modules_of(face: ast.Module) -> dict[str, str]:
    """Return the module of each public name, from the imports for type checkers."""
    lists = (node for node in face.body if isinstance(node, ast.Assign))
    (listed,) = (node.value for node in lists if ast.unparse(node.targets[0]) == "__all__")
    public = ast.literal_eval(listed)
    return {
        alias.name: str(node.module)
        for node in ast.walk(face)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in public
    }


def groups(docstring: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the title of each group of names in the package's docstring, and its names."""
    for block in re.split(r"\n\n(?=[A-Z][\w ]*:\n)", docstring)[1:]:
        title, _, rest = block.partition(":\n")
        entries = re.findall(r"(?ms)^- (.*?)(?=^- |\n\n|\Z)", rest)
        yield title, [name for entry in entries for name in names_of(entry)]


def names_of(entry: str) -> list[str]:
    """Return the names that an entry describes: those before a colon, and after a semicolon."""
    heads = re.findall(r"(?:^|;\s+)((?:``\w+``(?:,\s)?)+):", entry)
    return re.findall(r"``(\w+)``", " ".join(heads))


def section(full_name: str, module: str, name: str, with_methods: bool = True) -> str:
    """Return heading, signature and docstring of a name, and those of a class's methods."""
    found = definition(module, name)
    parts = [f"### `{full_name}`\n", f"```python\n{signature(found)}\n```\n"]
    parts.append(rendered(ast.get_docstring(found.node) or ""))
    if isinstance(found.node, ast.ClassDef) and found.node.bases:
        parts.append(f"Base: {', '.join(f'`{source(base)}`' for base in found.node.bases)}.\n")
    if isinstance(found.node, ast.ClassDef) and with_methods:
        for method in found.node.body:
            if isinstance(method, ast.FunctionDef) and is_public(method):
                inner = Definition(method, found.text, found.path)
                parts.append(f"#### `{name}.{method.name}`\n")
                if not is_property(method):
                    parts.append(f"```python\n{signature(inner)}\n```\n")
                parts.append(rendered(ast.get_docstring(method) or ""))
    return "\n".join(parts)


def definition(module: str, name: str) -> Definition:
    """Return the class or the function of a module."""
    path = SOURCE / f"{module.replace('.', '/')}.py"
    text = path.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return Definition(node, text, path)
    raise SystemExit(f"{path} does not define {name}.")


def is_public(method: ast.FunctionDef) -> bool:
    """Return whether a user may call or write a method. Hooks of Lightning are not listed."""
    return not method.name.startswith(("_", "on_")) and bool(ast.get_docstring(method))


def is_property(method: ast.FunctionDef) -> bool:
    """Return whether a method is read as an attribute."""
    names = {one.id for one in method.decorator_list if isinstance(one, ast.Name)}
    return bool(names & {"property", "cached_property"})


def signature(found: Definition) -> str:
    """Return the signature as the source has it; for a class that of its ``__init__``."""
    node, name = found.node, found.node.name
    if isinstance(node, ast.ClassDef):
        inits = [one for one in node.body if getattr(one, "name", "") == "__init__"]
        if inits:
            assert isinstance(inits[0], ast.FunctionDef)
            return arguments(f"class {name}", inits[0])
        is_dataclass = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and is_dataclass]
        return f"class {name}({', '.join(map(source, fields))})" if fields else f"class {name}"
    return arguments(f"def {name}", node)


def arguments(head: str, node: ast.FunctionDef) -> str:
    """Return a head with its arguments, one per line if they are long."""
    args = node.args
    given = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(given) - len(args.defaults)) + [*args.defaults]
    listed = [argument(one, default) for one, default in zip(given, defaults, strict=True)]
    if args.vararg:
        listed.append(f"*{ast.unparse(args.vararg)}")
    elif args.kwonlyargs:
        listed.append("*")
    pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    listed += [argument(one, default) for one, default in pairs]
    if args.kwarg:
        listed.append(f"**{ast.unparse(args.kwarg)}")
    listed = [one for one in listed if one not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    returns = "" if node.name == "__init__" else returns
    line = f"{head}({', '.join(listed)}){returns}"
    if len(line) <= 88:
        return line
    return f"{head}(\n" + "".join(f"    {one},\n" for one in listed) + f"){returns}"


def argument(one: ast.arg, default: ast.expr | None) -> str:
    """Return an argument with its annotation and its default."""
    text = source(one)
    if default is None:
        return text
    value = source(default)
    return f"{text} = {value}" if one.annotation else f"{text}={value}"


def source(node: ast.AST) -> str:
    """Return the code of a node, with the quotes of the formatter."""
    return ast.unparse(node).replace("'", '"')


def rendered(docstring: str) -> str:
    """Return a docstring as Markdown: sections as lists, blocks after ``::`` as code."""
    parts, section_name = [], ""
    for block in re.split(r"\n\n+(?=\S)", docstring.strip("\n")):
        match = re.match(rf"({'|'.join(SECTIONS)}):\n", block)
        section_name = match[1] if match else ""
        if section_name in ("Args", "Attributes", "Raises"):
            title = "Arguments" if section_name == "Args" else section_name
            entries = re.split(r"\n(?=\S)", textwrap.dedent(block.partition("\n")[2]).strip("\n"))
            parts.append(f"**{title}:**\n\n" + "\n".join(map(entry, entries)) + "\n")
        elif section_name:
            text = textwrap.dedent(block.partition("\n")[2])
            parts.append(f"**{section_name}:** {prose(text)}\n")
        else:
            head, colons, example = block.partition("::\n\n")
            items = re.split(r"\n(?=- )", head)  # a list, perhaps after a line
            text = "\n".join(prose(one) for one in items if one.startswith("- "))
            first = "" if items[0].startswith("- ") else prose(items[0])
            parts.append("\n\n".join(filter(None, [first, text])) + f"{':' if colons else ''}\n")
            if colons:
                parts.append(f"```python\n{textwrap.dedent(example).rstrip()}\n```\n")
    return "\n".join(parts)


def entry(text: str) -> str:
    """Return an entry such as ``lr: the rate`` as an item of a list."""
    name, _, rest = text.partition(":")
    names = ", ".join(f"`{one.strip()}`" for one in name.split(","))
    return f"- {names}: {prose(rest)}"


def prose(text: str) -> str:
    """Return the text on one line, with Markdown's marks for code."""
    pieces = re.split(r"(``[^`]*``|`[^`]*`)", " ".join(text.split()))
    for number, piece in enumerate(pieces):
        if number % 2:
            pieces[number] = f"`{piece.strip('`')}`"
        else:
            pieces[number] = re.sub(r"[<*\[]", lambda match: "\\" + match[0], piece)
    return "".join(pieces)
