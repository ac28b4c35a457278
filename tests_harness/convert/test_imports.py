"""The converter is a package of its own: it needs Python and two leaves of the harness."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import harness.convert
from harness import errors, files

CONVERTER = sorted(Path(str(harness.convert.__file__)).parent.glob("*.py"))
LEAVES = [Path(str(files.__file__)), Path(str(errors.__file__))]
OPTIONAL = {"numpy", "torch", "yaml"}  # each is imported where it is needed, and not before


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the modules that a file imports, and whether it does so when it is imported itself."""
    tree = ast.parse(path.read_text())
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
            if node.module == "harness":
                names = [f"harness.{alias.name}" for alias in node.names]
            yield from ((name, id(node) in at_once) for name in names)


@pytest.mark.parametrize("path", [*CONVERTER, *LEAVES], ids=lambda path: path.name)
def test_only_python_itself_and_the_leaves_are_imported(path: Path) -> None:
    allowed = set() if path in LEAVES else {"harness.errors", "harness.files"}
    for name, is_at_once in imported(path):
        package = name.partition(".")[0]
        is_optional = package in OPTIONAL and path not in LEAVES and not is_at_once
        assert package in sys.stdlib_module_names or name in allowed or is_optional, name


@pytest.mark.parametrize("path", CONVERTER, ids=lambda path: path.name)
def test_no_project_is_named(path: Path) -> None:
    texts = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
    assert not [text for text in texts if isinstance(text, str) and "project." in text]


WITHOUT = """
import sys
for name in ("torch", "numpy", "hydra", "omegaconf", "yaml", "pytorch_lightning",
             "lightning_fabric", "lightning", "safetensors"):
    sys.modules[name] = None  # an import of it raises, as where it is not installed
import runpy
sys.argv[0] = "convert"
runpy.run_module("harness.convert", run_name="__main__")
"""


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_command_works_where_torch_is_not_installed(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": {"net.a": torch.ones(3)}}, tmp_path / "checkpoints" / "a.ckpt")
    (tmp_path / "config.yaml").write_text("model: {net: {_target_: torch.nn.Identity}}")
    command = [sys.executable, "-c", WITHOUT, "checkpoints/a.ckpt", "-o", f"out{suffix}"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "verified  every byte" in result.stdout
    assert "config.yaml: " in result.stdout  # why it was not held against the network
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "config.yaml", f"out{suffix}"]


ALONE = "import runpy, sys; sys.path[:0] = [sys.argv.pop(1)]; runpy.run_module('harness.convert')"


def alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the converter and its two leaves, taken out of the harness, with Python itself alone."""
    package = folder / "package" / "harness"
    shutil.copytree(CONVERTER[0].parent, package / "convert", dirs_exist_ok=True)
    for leaf in LEAVES:
        shutil.copy(leaf, package)
    code = ALONE.replace("convert')", "convert', run_name='__main__')")
    command = [sys.executable, "-I", "-S", "-c", code, str(package.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_converter_can_be_taken_out_as_a_package_of_its_own(
    suffix: str, tmp_path: Path
) -> None:
    torch.save({"state_dict": {"net.a": torch.ones(3)}}, tmp_path / "a.ckpt")
    result = alone(tmp_path, "a.ckpt", "-o", f"out{suffix}")
    assert (result.returncode, result.stderr) == (0, "")
    assert "verified  every byte" in result.stdout


def test_what_needs_numpy_says_so(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(9)[::2], "b": torch.ones(3)}, tmp_path / "a.ckpt")
    for options in ([], ["--dtype", "float16"]):
        result = alone(tmp_path, "a.ckpt", "-o", "out.pt", *options)
        assert (result.returncode, result.stderr.count("\n")) == (3, 1)
        assert "need NumPy: pip install numpy" in result.stderr
        assert not (tmp_path / "out.pt").exists()
