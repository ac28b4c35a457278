"""Read the config files with their comments: each key, its default, and what it means.

The comment behind a key, or the lines of comment directly above it, say what it means. The first
comment of a file describes the file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from template.site.markdown import ROOT, first_comment

FOLDERS = (ROOT / "conf", ROOT / "harness" / "src" / "harness" / "conf")
SETTINGS = ("experiment", "debug")  # groups whose files only set keys of other files


@dataclass
class Key:
    """A key of a config file that holds a value."""

    path: str  # as a command sets it, such as model.net.hidden
    default: str  # as the file has it
    comment: str
    target: str  # the class that gets the value as an argument; "" if none does

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def refers_to(self) -> str:
        """Return the key whose value this key takes, as in ``${seed}``; "" if there is none."""
        return "".join(re.findall(r"^\$\{([\w.]+)\}$", self.default))


@dataclass
class ConfigFile:
    """A config file."""

    path: Path
    group: str
    text: str  # the first comment, without the examples
    examples: str  # the commands in the first comment
    target: str
    bases: list[tuple[str, str]]  # group and choice of each entry of the defaults list
    keys: list[Key]

    @property
    def name(self) -> str:
        """Return the name by which a command or a defaults list chooses the file."""
        choice = self.path.stem
        return f"{self.group}/{choice}.yaml" if choice[0] == "_" else f"{self.group}={choice}"


Files = dict[tuple[str, str], ConfigFile]


def read_all() -> Files:
    """Return every config file, by its group and choice."""
    return {
        (group, path.stem): read(path, group)
        for folder in FOLDERS
        for path in sorted(folder.rglob("*.yaml"))
        for group in [path.parent.relative_to(folder).as_posix().strip(".")]
        if path.name != "rules.yaml"
    }


def read(path: Path, group: str) -> ConfigFile:
    """Return one config file."""
    content, head = path.read_text(), first_comment(path)
    lines = [""] * len(head) + content.splitlines()[len(head) :]
    package = group.replace("/", ".")
    if head and head[0].startswith("@package "):
        package = re.sub(r"^_global_\.?", "", head.pop(0).split()[-1])
    text = " ".join(line for line in head if not line.startswith("  "))
    examples = "\n".join(line[2:] for line in head if line.startswith("  "))
    node = yaml.compose(content, Loader=yaml.CSafeLoader) or yaml.MappingNode("", [])
    bases = [*bases_of((yaml.safe_load(content) or {}).get("defaults", []), group)]
    keys = [*keys_below(node, package, lines)]
    return ConfigFile(path, group, text, examples, target_of(node), bases, keys)


def keys_below(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[Key]:
    """Yield the keys of a mapping that hold a value, depth first."""
    for key, value in node.value:
        path = f"{prefix}.{key.value}".strip(".")
        if key.value == "defaults" or key.value[0] == "_":
            continue  # of Hydra
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from keys_below(value, path, lines)
            continue
        number, column = key.start_mark.line, key.start_mark.column
        default, behind, comment = lines[number][key.end_mark.column + 1 :].partition(" # ")
        while not behind and lines[number - 1].startswith(" " * column + "# "):
            number -= 1
            comment = f"{lines[number].strip('# ')} {comment}"
        yield Key(path, default.strip(), comment.strip(), target_of(node))


def target_of(node: yaml.MappingNode) -> str:
    """Return the ``_target_`` of a mapping; "" if it has none."""
    return next((value.value for key, value in node.value if key.value == "_target_"), "")


def bases_of(defaults: list[Any], group: str) -> Iterator[tuple[str, str]]:
    """Yield group and choice of each entry of a defaults list."""
    for entry in defaults:
        for name, choice in entry.items() if isinstance(entry, dict) else [("", entry)]:
            name = name.removeprefix("override ")
            yield (name if name[:1] == "/" else f"{group}/{name}").strip("/"), str(choice)


def same_keys(files: Files, file: ConfigFile, key: Key) -> list[Key]:
    """Return the same key of other files: of those that the file starts from, then of all.

    It has the same path, or is the same argument of the same class.
    """
    others = [*bases_below(files, file), *files.values()]
    keys = chain.from_iterable(one.keys for one in others if one.group not in SETTINGS)
    argument = (key.target or None, key.name)
    return [one for one in keys if one.path == key.path or (one.target, one.name) == argument]


def bases_below(files: Files, file: ConfigFile) -> Iterator[ConfigFile]:
    """Yield the files that a file starts from, and theirs."""
    for base in filter(None, map(files.get, file.bases)):
        yield base
        yield from bases_below(files, base)


def meaning(file: ConfigFile, key: Key, same: list[Key]) -> str:
    """Return what a key means: its own comment, or that of the same key elsewhere; "" if none.

    A value that only refers to another key needs no comment. An experiment's comment gives the
    reason of its value.
    """
    if key.comment and file.group not in SETTINGS:
        return key.comment
    if key.refers_to:
        return key.comment or f"equals `{key.refers_to}`"
    comments = [one.comment for one in same if one.comment] + [key.comment]
    is_reason = key.comment not in ("", comments[0])
    return f"{comments[0]}. Here: {key.comment}" if is_reason else comments[0]
