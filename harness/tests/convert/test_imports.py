"""The converter is a package of its own: it needs Python and two leaves of the harness."""

import shutil
import subprocess
import sys
from pathlib import Path

import torch

import harness.convert
from harness import errors, files

CONVERTER = sorted(Path(str(harness.convert.__file__)).parent.glob("*.py"))
LEAVES = [Path(str(files.__file__)), Path(str(errors.__file__))]
ALONE = """
import runpy, sys
sys.path[:0] = [sys.argv.pop(1)]
runpy.run_module("harness.convert", run_name="__main__")
"""


def alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the converter and its two leaves, taken out of the harness, with Python itself alone."""
    package = folder / "package" / "harness"
    shutil.copytree(CONVERTER[0].parent, package / "convert", dirs_exist_ok=True)
    for leaf in LEAVES:
        shutil.copy(leaf, package)
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(package.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_the_converter_can_be_taken_out_as_a_package_of_its_own(tmp_path: Path) -> None:
    """Where neither torch nor numpy is installed; what needs numpy says so."""
    torch.save({"state_dict": {"net.a": torch.ones(3)}}, tmp_path / "a.ckpt")
    for suffix in (".pt", ".safetensors"):
        result = alone(tmp_path, "a.ckpt", "-o", f"out{suffix}")
        assert (result.returncode, result.stderr) == (0, "")
        assert "verified  every byte" in result.stdout
    result = alone(tmp_path, "a.ckpt", "-o", "half.pt", "--dtype", "float16")
    assert (result.returncode, result.stderr.count("\n")) == (3, 1)
    assert "need NumPy: pip install numpy" in result.stderr
    assert not (tmp_path / "half.pt").exists()
