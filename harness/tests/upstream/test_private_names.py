"""Each private name that harness/upstream relies on is there; where it is not, its test fails."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl

from harness import upstream
from harness.upstream import versions
from tests.conftest import LIBRARY
from tests.upstream.test_border import foreign, is_private, sources

# Settings of torch; and the process group, which the first-batch check puts back.
SETTINGS = {"config", "torch.backends.cudnn", "dist.group"}
MOST_NAMES, MOST_PATCHES = 40, 3

FILES = sorted(
    info.name for info in pkgutil.iter_modules(upstream.__path__) if info.name != "versions"
)
NAMES = [(file, name) for file in FILES for name in versions.private_names(file)]

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says of a Trainer


@pytest.fixture
def trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


def test_upstream_has_every_name(trainer: pl.Trainer) -> None:
    """Also what is only assigned, which would otherwise go unnoticed."""
    found = {name: versions.missing(name, trainer) for _, name in NAMES}
    assert {name: error for name, error in found.items() if error is not None} == {}


def test_every_touch_of_a_file_is_in_its_list() -> None:
    for file in FILES:
        module = importlib.import_module(f"harness.upstream.{file}")
        listed = {part for name in versions.private_names(file) for part in re.split(r"\W+", name)}
        used = set()
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
        own = {name for name in vars(module) if is_private(name)} | {"_ResultCollection"}
        assert set(filter(is_private, used)) - own - listed == set(), file


def test_private_names_and_patches_are_few() -> None:
    """``python -m tests.upstream.test_private_names`` lists them. They may only become fewer."""
    assert len({name for _, name in NAMES}) <= MOST_NAMES
    assert len(list(all_patches())) <= MOST_PATCHES


def all_patches() -> Iterator[str]:
    """What is assigned to modules and classes of other packages, for the whole process."""
    for path in sources():
        tree = ast.parse(path.read_text())
        imported = foreign(tree)
        for node in ast.walk(tree):
            found: Any = None
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found = node.value
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                found = node.args[0]
            owner = ast.unparse(found) if found is not None else ""
            if owner.partition(".")[0] in imported and owner not in SETTINGS:
                yield f"{path.relative_to(LIBRARY)}:{node.lineno}: {ast.unparse(node)}"


def test_patches_are_found() -> None:
    assert list(all_patches()) != []  # of upstream/processes.py, at least


def remove(name: str, trainer: pl.Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a name away from the module, or from all objects of the class, that has it."""
    module, _, path = name.partition(":")
    *parents, last = path.split(".")
    owner: Any = trainer if module == "trainer" else importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent.removesuffix("()"))
        owner = owner() if parent.endswith("()") else owner
    if inspect.ismodule(owner):
        monkeypatch.delattr(owner, last)
        return
    original = type(owner).__getattribute__

    def without(self: Any, attribute: str) -> Any:
        if attribute == last:
            raise AttributeError(attribute)
        return original(self, attribute)

    monkeypatch.setattr(type(owner), "__getattribute__", without)


if __name__ == "__main__":
    print(*sorted({name for _, name in NAMES}), *all_patches(), sep="\n")
