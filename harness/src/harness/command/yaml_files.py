"""Mistakes inside of the YAML files of conf/, told with their line."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from harness.command import config_files
from harness.command.config_files import groups
from harness.command.explain import nearest
from harness.errors import UserError
from harness.places import shown

# What PyYAML says, in the words of somebody who types.
SYNTAX = {
    "while parsing a flow sequence": "a [ is not closed, or a comma is missing",
    "while parsing a flow mapping": "a { is not closed, or a comma is missing",
    "while scanning a quoted scalar": "a quotation mark is not closed",
    "mapping values are not allowed": "a second colon, none in the line before, or indented deeper",
    "could not find expected ':'": "a colon is missing, here or in the line before",
    "cannot start any token": "a tab or another character that begins nothing; indent with spaces",
    "expected <block end>": "indented otherwise than the lines before",
}
# Nothing runs without their keys.
NEEDED = ("data", "model", "trainer", "gpus", "callbacks", "logger")
PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


def explain_syntax(error: yaml.YAMLError) -> str:
    """Say where a file is no YAML, and show the line."""
    text = str(error)
    is_open = "while parsing a flow" in text or "while scanning a quoted" in text
    mark = getattr(error, "context_mark" if is_open else "problem_mark", None)
    if mark is None:
        return " ".join(text.split())
    problem = str(getattr(error, "problem", text))
    said = next((words for part, words in SYNTAX.items() if part in text), problem)
    path = Path(mark.name)
    lines = path.read_text().splitlines() if path.is_file() else []
    return "\n".join([f"{shown(path)}:{mark.line + 1}: {said}.", *lines[mark.line : mark.line + 1]])


def check_experiments(task: str, overrides: list[str], conf: Path) -> None:
    """Refuse what an experiment's YAML file sets and nothing reads.

    Raises:
        UserError: with the file, the line and the nearest key.
    """
    if task != "train":
        return  # only a training has experiments
    known = _entries(conf / "train.yaml")
    names = {*known, *groups(conf), "defaults", "hydra"}
    for path in _chosen(overrides, conf):
        if not (header := PACKAGE.search(path.read_text())) or header[1] != "_global_":
            continue
        entries = _entries(path)
        has_objective = "objective" in entries and not _is_null(entries["objective"][1])
        if has_objective and "mode" not in entries:
            raise UserError(
                f"{shown(path)}:{entries['objective'][0]}: objective without its mode, which a "
                "model may have set to the other one.\nAdd mode: min or mode: max below it."
            )
        for name, (line, value) in entries.items():
            is_null = name == "data" and value.value in ("null", "~")  # the model's own loaders
            if name in NEEDED and not isinstance(value, yaml.MappingNode) and not is_null:
                raise UserError(
                    f"{shown(path)}:{line}: there are no keys below {name}.\n"
                    "Indent them, and write each as key: value, with a space after the colon."
                )
            if name == "init" and isinstance(value, yaml.ScalarNode) and not _is_null(value):
                raise UserError(
                    f"{shown(path)}:{line}: init has keys. Write init: {{path: {value.value}}}"
                )
            if name not in names and not _is_read(name, conf):
                _refuse(path, line, name, overrides, conf)
            settings = _keys(known[name][1]) if name in known else {}
            for child, (line_of_child, _) in _keys(value).items():
                if settings and child not in settings:
                    _refuse(path, line_of_child, f"{name}.{child}", overrides, conf)


def _refuse(path: Path, line: int, key: str, overrides: list[str], conf: Path) -> None:
    without = [text for text in overrides if not text.lstrip("+").startswith("experiment=")]
    raise UserError(
        f"{shown(path)}:{line}: nothing reads {key}.{nearest(key, 'train', without, conf)}"
    )


def _chosen(overrides: list[str], conf: Path) -> Iterator[Path]:
    """The experiment's files that a command names, of its own folder and of those it adds."""
    places = [Path(place) for place in re.findall(r"file://([^,\]\s]+)", " ".join(overrides))]
    for text in overrides:
        group, _, choices = text.lstrip("+").partition("=")
        for choice in re.findall(r"[^\s,\[\]'\"]+", choices) if group == "experiment" else ():
            paths = [place / group / f"{choice}.yaml" for place in (*places, conf)]
            yield from [path for path in paths if path.is_file()][:1]


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _is_read(name: str, conf: Path) -> bool:
    """Whether a value of some file is filled in from a key."""
    pattern = re.compile(r"\$\{" + re.escape(name) + r"\b")
    return any(pattern.search(path.read_text()) for path in config_files.files(conf))


def _entries(path: Path) -> dict[str, tuple[int, yaml.Node]]:
    with path.open() as file:
        return _keys(yaml.compose(file, Loader=yaml.SafeLoader))


def _keys(node: yaml.Node | None) -> dict[str, tuple[int, yaml.Node]]:
    """The keys of a mapping with their lines, counted from 1, and their values."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: (key.start_mark.line + 1, value) for key, value in node.value}
