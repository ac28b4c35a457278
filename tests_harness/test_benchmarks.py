"""The benchmarks run; what they measure is for people to read."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests_harness.conftest import ROOT

PROGRAMS = sorted(
    path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()
)


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / program), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_benchmark_tells_its_usage(program: str, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / "benchmarks" / program), run_name="__main__")
    assert f"python benchmarks/{program}" in capsys.readouterr().out


@pytest.mark.slow
def test_the_memory_of_a_run_is_measured_as_it_goes_on(tmp_path: Path) -> None:
    table = tmp_path / "memory.json"
    printed = run("memory.py", "--repeats=1", "--steps=50", f"--json={table}")
    for name, (row,) in json.loads(table.read_text())["figures"].items():
        assert name in printed
        assert 0 < row["before"] < row["early"] < 2 * row["late"]


def test_the_parts_of_a_step_are_measured(tmp_path: Path) -> None:
    table = tmp_path / "exactness.json"
    printed = run("exactness.py", "--repeats=1", f"--json={table}")
    figures = json.loads(table.read_text())["figures"]
    assert figures.keys() >= {"weight of an uneven batch", "random numbers by sample"}
    assert all(name in printed for name in figures)


def test_the_overhead_is_measured(tmp_path: Path) -> None:
    """With little data: three contenders, each as often as asked, and the machine's name."""
    table = tmp_path / "overhead.json"
    printed = run("overhead.py", "--repeats=2", "--num-train=640", f"--json={table}")
    figures = json.loads(table.read_text())
    assert set(figures["figures"]) == {"by hand", "this project", "plain Lightning"}
    assert all(len(values) == 2 and min(values) > 0 for values in figures["figures"].values())
    assert figures["machine"] in printed
    assert "1.00 (1.00 - 1.00)" in printed  # the loop by hand against itself
