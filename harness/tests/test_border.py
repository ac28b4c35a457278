"""A project imports the library, and the library never imports a project."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.conftest import LIBRARY

HARNESS = LIBRARY / "src" / "harness"
FILES = sorted(HARNESS.rglob("*.py"))
# The package of a project, by its folders, and the place of these.
PROJECT_NAMES = re.compile(r"\bproject\.(models|data|callbacks)\b|src/project")
KEYS = {"data", "init", "sweep", "checkpoint"}  # keys of a config that are modules as well


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


def test_library_imports_no_project() -> None:
    projects = ("project", "tests")
    wrong = [
        (path, name) for path in FILES for name in imported(path) if folder_of(name, 0) in projects
    ]
    assert wrong == []
    assert [path for path in FILES if PROJECT_NAMES.search(path.read_text())] == []


def folder_of(module: str, level: int = 1) -> str:
    """Return the folder of a module in the library, or the name of a file beside the folders."""
    return module.split(".")[level]


def test_folders_of_the_library_form_no_circle() -> None:
    """Each folder imports only folders below it; a circle would make two folders one."""
    imports: dict[str, set[str]] = {}
    for path in FILES:
        parts = path.relative_to(LIBRARY / "src").with_suffix("").parts
        assert "harness" not in imported_packages(path), f"{path} imports the face of the package"
        if len(parts) == 2 and parts[1].startswith("__"):
            continue  # the public names, and ``python -m harness``
        used = {folder_of(name) for name in imported(path) if name.startswith("harness.")}
        imports.setdefault(parts[1], set()).update(used - {parts[1]})
    names = {path.relative_to(HARNESS).parts[0].removesuffix(".py") for path in FILES}
    imports = {name: used & names for name, used in imports.items()}
    while imports:
        lowest = [name for name, used in imports.items() if not used & imports.keys()]
        assert lowest, (
            f"a circle: { {name: used & imports.keys() for name, used in imports.items()} }"
        )
        for name in lowest:
            del imports[name]


def test_converter_uses_two_leaves_of_the_harness_and_no_more() -> None:
    used = {
        name
        for path in (HARNESS / "convert").rglob("*.py")
        for name in imported(path)
        if name.startswith("harness.") and not name.startswith("harness.convert")
    }
    assert {folder_of(name) for name in used} <= {"errors", "files"}


def test_no_file_of_the_harness_is_longer_than_a_person_reads() -> None:
    long = {path.name: n for path in FILES if (n := len(path.read_text().splitlines())) > 300}
    assert not long


@cache
def names_in(path: Path) -> set[str]:
    """The names that a file defines or uses, without attributes."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}


def missing_names(text: str) -> Iterator[str]:
    """Yield each file and each ``module.name`` of the library that a text names, and that is gone.

    A file is named by the end of its path in backticks, or by a path below ``tests`` or ``docs``.
    """
    for name in re.findall(r"``(?:harness/)?([\w/]+\.(?:py|md))``", text):
        if not any(True for _ in LIBRARY.rglob(name)):
            yield name
    for name in re.findall(r"\b((?:tests|docs|benchmarks)/\w[\w/]*\b(?:\.\w+)?)", text):
        if not (LIBRARY / name).exists():
            yield name
    for module, name in re.findall(r"``(?:harness\.)?(\w+)\.(?!py\b)(\w+)[^`]*``", text):
        files, folder = [path for path in FILES if path.stem == module], HARNESS / module
        is_known = any(name in names_in(path) for path in files) or any(folder.glob(f"{name}*"))
        if (files or folder.is_dir()) and module not in KEYS and not is_known:
            yield f"{module}.{name}"


def test_files_and_functions_that_texts_name_exist() -> None:
    assert [(path.name, name) for path in FILES for name in missing_names(path.read_text())] == []


def test_a_name_that_is_gone_is_found() -> None:
    gone = ["gone.py", "tests/compat/test_hooks.py", "main.start", "distributed.gone"]
    assert list(missing_names(f"``{gone[0]}``, {gone[1]}, ``{gone[2]}``, ``{gone[3]}``")) == gone
