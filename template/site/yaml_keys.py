"""Read the config files with their comments: each key, its default, and what it means.

In: ``conf/`` and the library's ``conf``. Out: a ``ConfigFile`` for each, with its ``Key``s. A
key's meaning is the comment behind it, or the lines of comment directly above it. Next:
``config_page`` writes them down.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "conf", ROOT / "harness" / "src" / "harness" / "conf")
COMMENT = re.compile(r"(?:^|\s)#\s?(.*)$")
# Hydra's keys: the page names the class of a _target_, and says nothing else of these.
OF_HYDRA = ("_target_", "_partial_", "_self_", "_args_", "_recursive_", "_convert_")


@dataclass
class Key:
    """A key of a config file.

    Attributes:
        path: the key as a command sets it, such as ``model.net.hidden``.
        default: the value as the file has it.
        value: the same, parsed.
        comment: the comment behind the key or above it; "" if there is none.
        target: the class that gets the value as an argument; "" if none does.
        is_group: whether further keys are below this one.
    """

    path: str
    default: str
    value: object
    comment: str
    target: str = ""
    is_group: bool = False

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def refers_to(self) -> str:
        """Return the key whose value this key takes, as in ``${seed}``; "" if there is none."""
        match = re.fullmatch(r"\$\{([\w.]+)\}", self.default)
        return match[1] if match else ""


@dataclass
class ConfigFile:
    """A config file.

    Attributes:
        path: below the repository.
        group: the config group, such as ``model/optimizer``; "" for ``train.yaml``.
        text: the first comment of the file, without the examples.
        examples: the commands in the first comment.
        bases: the files that the defaults list names: group and choice.
        keys: in the order of the file.
    """

    path: Path
    group: str
    text: str = ""
    examples: list[str] = field(default_factory=list)
    bases: list[tuple[str, str]] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    target: str = ""

    @property
    def choice(self) -> str:
        """Return the name to choose it by, as in ``model=<choice>``."""
        return self.path.stem

    @property
    def is_choice_of_settings(self) -> bool:
        """Return whether the file only sets keys of other files."""
        return self.group in ("experiment", "debug")

    def set_keys(self) -> list[Key]:
        """Return the keys that hold a value."""
        return [key for key in self.keys if not key.is_group]


def read_all() -> list[ConfigFile]:
    """Return every config file, in the order of the groups."""
    files = []
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.yaml")):
            if path.name != "rules.yaml":
                files.append(read(path, path.parent.relative_to(folder).as_posix().strip(".")))
    return files


def read(path: Path, group: str) -> ConfigFile:
    """Return one config file."""
    content = path.read_text()
    file = ConfigFile(Path(os.path.relpath(path, ROOT)), group)
    package = group.replace("/", ".")
    num_head = 0
    for line in content.splitlines():
        if not line.startswith("#"):
            break
        num_head += 1
        if line.startswith("# @package "):
            package = re.sub(r"^_global_\.?", "", line.split()[-1])
        elif line.startswith("#   "):
            if file.examples and file.examples[-1].endswith("\\"):
                file.examples[-1] += "\n  " + line.lstrip("# ")
            else:
                file.examples.append(line.lstrip("# "))
        else:
            file.text += line.lstrip("#").strip() + " "
    file.text = file.text.strip()
    node = yaml.compose(content, Loader=yaml.SafeLoader)
    if isinstance(node, yaml.MappingNode):
        file.target = own_target(node)
        lines = content.splitlines()
        # The first comment describes the file, not its first key.
        lines[:num_head] = [""] * num_head
        file.keys = list(keys_below(node, package, lines, file.target))
        file.bases = list(bases(yaml.safe_load(content), group))
    return file


def keys_below(node: yaml.MappingNode, prefix: str, lines: list[str], target: str) -> Iterator[Key]:
    """Yield the keys of a mapping, depth first."""
    for key, value in node.value:
        if key.value in OF_HYDRA or (key.value == "defaults" and key.start_mark.column == 0):
            continue
        path = f"{prefix}.{key.value}".strip(".")
        default, comment = default_and_comment(key, value, lines)
        if isinstance(value, yaml.MappingNode) and not value.flow_style and value.value:
            yield Key(path, "", None, comment, target, is_group=True)
            yield from keys_below(value, path, lines, own_target(value))
        else:
            yield Key(path, default, plain(default), comment, target)


def default_and_comment(key: yaml.Node, value: yaml.Node, lines: list[str]) -> tuple[str, str]:
    """Return the value as the file has it, and the comment behind it or above the key."""
    number = key.start_mark.line
    behind = lines[number][key.end_mark.column + 1 :]
    end = value.end_mark if value.start_mark.line == number else None
    if end is not None and end.line == number:  # a "#" in quotes starts no comment
        rest = lines[number][end.column :]
        default = lines[number][value.start_mark.column : end.column]
        default = behind.partition(" #")[0].strip() if "&" in behind else default
    else:  # an alias, or a mapping below
        rest, default = behind, behind.partition(" #")[0].strip()
    if match := COMMENT.search(rest):
        return default, match[1].strip()
    above: list[str] = []
    column = key.start_mark.column
    while number and lines[number - 1][:column].isspace() + (column == 0):
        number -= 1
        if not lines[number][column:].startswith("# "):
            break
        above.insert(0, lines[number].strip("# "))
    return default, " ".join(above)


def own_target(node: yaml.MappingNode) -> str:
    """Return the ``_target_`` of a mapping; "" if it has none."""
    return next((value.value for key, value in node.value if key.value == "_target_"), "")


def plain(text: str) -> object:
    """Return the value of a default."""
    try:
        return yaml.safe_load(re.sub(r"^[&*]\w+\s*", "", text))
    except yaml.YAMLError:
        return text


def bases(content: dict[str, object], group: str) -> Iterator[tuple[str, str]]:
    """Yield group and choice of each file that a defaults list names."""
    listed = content.get("defaults") or []
    assert isinstance(listed, list)
    for entry in listed:
        if isinstance(entry, str):
            if entry != "_self_":
                yield group, entry
            continue
        for name, choice in entry.items():
            name = name.removeprefix("override ")
            where = name.lstrip("/") if name.startswith("/") or not group else f"{group}/{name}"
            for one in choice if isinstance(choice, list) else [choice]:
                if one is not None:
                    yield where, str(one)


def find(files: list[ConfigFile], group: str, choice: str) -> ConfigFile | None:
    """Return a file by its group and choice."""
    return next((file for file in files if (file.group, file.choice) == (group, choice)), None)


def chain(files: list[ConfigFile], file: ConfigFile) -> Iterator[ConfigFile]:
    """Yield the files that a file starts from, and theirs."""
    for group, choice in file.bases:
        if (base := find(files, group, choice)) is not None:
            yield base
            yield from chain(files, base)


def meaning(files: list[ConfigFile], file: ConfigFile, key: Key) -> str:
    """Return what a key means: its own comment, or that of the same key elsewhere; "" if none.

    A value that only refers to another key needs no comment. Otherwise the same key is, in this
    order: that of a file that this file starts from, the same argument of the same class, that of
    another choice of the group, and that of any file, if all files say the same.
    """
    if key.comment and not file.is_choice_of_settings:
        return key.comment
    if key.refers_to:
        return key.comment or f"equals `{key.refers_to}`"
    by_class = [one for other in files for one in other.keys if one.target == key.target]
    group = [] if key.target else [other for other in files if other.group == file.group]
    others = [one.comment for one in same_path([] if key.target else files, key) if one.comment]
    comments = [
        *(one.comment for one in same_path(chain(files, file), key)),
        *(one.comment for one in by_class if key.target and one.name == key.name),
        *(one.comment for one in same_path(group, key)),
        *(others if len({*others}) == 1 else []),
    ]
    comment = next(filter(None, comments), "")
    if not comment or key.comment in ("", comment):
        return comment or key.comment
    return f"{comment}. Here: {key.comment}"


def same_path(files: Iterable[ConfigFile], key: Key) -> list[Key]:
    """Return the keys of the files that a command sets by the same path."""
    keys = (one for file in files if not file.is_choice_of_settings for one in file.set_keys())
    return [one for one in keys if one.path == key.path]
