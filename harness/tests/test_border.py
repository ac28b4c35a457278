"""Who may know whom: the owner's project knows the harness, and never the other way round."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.conftest import LIBRARY

HARNESS = LIBRARY / "src" / "harness"
FILES = sorted(HARNESS.rglob("*.py"))
# The owner's package, by the folders that it has, and where it lies.
OWNERS = re.compile(r"\bproject\.(models|data|callbacks)\b|src/project")


@cache
def imported(path: Path) -> list[str]:
    """The modules that a file imports, at its top or inside of a function."""
    package = ".".join(path.relative_to(LIBRARY / "src").parts[:-1])
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            module = f"{base}{node.module or ''}".rstrip(".")
            names += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return names


def imported_packages(path: Path) -> set[str]:
    """The packages that a file imports as a whole: ``import a``, and ``from a import`` a name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module == "harness":
            files = {entry.stem for entry in HARNESS.iterdir()}
            found |= {"harness" for alias in node.names if alias.name not in files}
    return found


def test_harness_knows_nothing_of_the_owners_package() -> None:
    owners = ("project", "tests")
    wrong = [(path, name) for path in FILES for name in imported(path) if room(name, 0) in owners]
    assert wrong == []
    assert [path for path in FILES if OWNERS.search(path.read_text())] == []


def room(module: str, level: int = 1) -> str:
    """The room of the harness that a module is in: a folder, or a file beside them."""
    return module.split(".")[level]


def test_rooms_of_the_harness_form_no_circle() -> None:
    """Each room imports rooms below it only; a circle would make two rooms one."""
    rooms: dict[str, set[str]] = {}
    for path in FILES:
        parts = path.relative_to(LIBRARY / "src").with_suffix("").parts
        assert "harness" not in imported_packages(path), f"{path} imports the face of the package"
        if len(parts) == 2 and parts[1].startswith("__"):
            continue  # the face, which shows what is in the rooms, and ``python -m harness``
        used = {room(name) for name in imported(path) if name.startswith("harness.")}
        rooms.setdefault(parts[1], set()).update(used - {parts[1]})
    names = {path.relative_to(HARNESS).parts[0].removesuffix(".py") for path in FILES}
    rooms = {name: used & names for name, used in rooms.items()}
    while rooms:
        lowest = [name for name, used in rooms.items() if not used & rooms.keys()]
        assert lowest, f"a circle: { {name: used & rooms.keys() for name, used in rooms.items()} }"
        for name in lowest:
            del rooms[name]


def test_converter_uses_two_leaves_of_the_harness_and_no_more() -> None:
    used = {
        name
        for path in (HARNESS / "convert").rglob("*.py")
        for name in imported(path)
        if name.startswith("harness.") and not name.startswith("harness.convert")
    }
    assert {room(name) for name in used} <= {"errors", "files"}


def test_no_file_of_the_harness_is_longer_than_a_person_reads() -> None:
    long = {path.name: n for path in FILES if (n := len(path.read_text().splitlines())) > 300}
    assert not long
