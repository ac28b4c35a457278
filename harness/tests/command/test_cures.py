"""Each override that the library's texts name can be typed: the config has its key."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness
from harness import UserError
from harness.command.compose import compose_command
from harness.suggestions import REPLACED
from tests.conftest import ROOT

LIBRARY = Path(harness.__file__).parent
OVERRIDE = re.compile(r"(?<![\w./<\[{(=\-])(?:\+\+?)?[a-z_]+(?:[./][\w]+)*=[^\s;]*")
# Keys that exist beside one choice of a group only. The message appears beside that choice.
BESIDE = {
    "callbacks.ema.": "callbacks=ema",
    "data.fold": "+data.fold=0",
    "data.num_folds": "+data.num_folds=5",
    "data.test_fraction": "+data.test_fraction=0.1",
    "data.val_fraction": "+data.val_fraction=0.1",
    "data.cache_dir": "+data.cache_dir=cache",
    "model.scheduler.": "model/scheduler=cosine",
    "sweep.sampler": "sweep=optuna",
    "sweep.sbatch": "sweep=slurm",
    "trainer.strategy.find_unused_parameters": "strategy=ddp",
    "trainer.strategy.modules": "strategy=dp",
    "trainer.strategy.scalar_outputs": "strategy=dp",
    "trainer.strategy.whole_inputs": "strategy=dp",
}
# Quoted in an answer as the mistake, a text of HTML, a pattern, or an example of ``-m``.
NOT_TYPED = re.compile(r"gpus=[\d\[]|gpus=<cfg|\w+=\"|\S+{0|seed=1,2,3|\S+=tag\(")
GROUPS = ("strategy", "experiment", "debug", "callbacks", "logger", "sweep", "data", "model")


def as_text(node: ast.AST) -> str:
    """A string's text, with ``<code>`` where an f-string has a value."""
    if isinstance(node, ast.JoinedStr):
        return "".join(as_text(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"<{ast.unparse(node.value)}>".replace(" ", "")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def texts(node: ast.AST) -> Iterator[str]:
    """The strings below a node, without docstrings."""
    body = getattr(node, "body", None)
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(body, list) and child is body[0] and isinstance(child, ast.Expr)
        if text := as_text(child):
            yield text
        elif not is_docstring:
            yield from texts(child)


def overrides() -> dict[str, str]:
    """The overrides of messages, whose keys begin as the config's do, and their files."""
    first = {*compose_command("train", [], ROOT / "conf").cfg, "sweep"}
    found: dict[str, str] = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        for text in texts(ast.parse(path.read_text())):
            for override in OVERRIDE.findall(text):
                key = re.split(r"[./=]", override.lstrip("+"))[0]
                if key in first and not NOT_TYPED.match(override) and override not in REPLACED:
                    found[override.rstrip(".,:'\")")] = path.relative_to(LIBRARY).as_posix()
    return found


def unknown(typed: list[str], beside: list[str]) -> list[str]:
    """The answers to the overrides that do not compose beside these choices."""
    try:
        compose_command("train", [*beside, *typed], ROOT / "conf")
    except UserError as error:
        if len(typed) == 1:
            return [f"{typed[0]}: {error}"]
        half = len(typed) // 2
        return unknown(typed[:half], beside) + unknown(typed[half:], beside)
    return []


def test_overrides_in_messages_compose() -> None:
    found = overrides()
    assert len(found) > 100  # the pattern still finds them
    typed: dict[tuple[str, ...], list[str]] = {}
    for override in found:
        key, _, value = override.partition("=")
        if "<" in value or not value:
            if key in GROUPS:
                continue  # a choice that the message takes from the command
            value = re.sub("<.*", "1", value) + "]" * value.startswith("[") or "1"
        beside = [choice for start, choice in BESIDE.items() if key.startswith(start)]
        if "/" in key or key in GROUPS:
            beside.append(f"notes={key}")  # one choice of a group at a time
        typed.setdefault(tuple(beside), []).append(f"{key}={value}")
    assert [answer for beside in typed for answer in unknown(typed[beside], [*beside])] == []


def test_message_with_an_unknown_key_is_found() -> None:
    with pytest.raises(UserError, match=r"no key trainer\.max_epoch"):
        compose_command("train", ["trainer.max_epoch=1"], ROOT / "conf")
