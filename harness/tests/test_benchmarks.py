"""The benchmarks run; what they measure is for people to read."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LIBRARY

FOLDER = LIBRARY / "benchmarks"


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / program), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_benchmark_tells_its_usage(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    programs = [path for path in FOLDER.glob("*.py") if "__main__" in path.read_text()]
    assert len(programs) > 5
    for path in programs:
        monkeypatch.setattr(sys, "argv", [path.name, "--help"])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(path), run_name="__main__")
        assert f"python benchmarks/{path.name}" in capsys.readouterr().out


def test_make_bench_runs_programs_that_are_there() -> None:
    text = (FOLDER / "bench.mk").read_text()
    named = [word.strip('"') for word in text.split() if word.endswith(".py")]
    assert len(named) > 4
    assert all((FOLDER / name).exists() for name in named)


@pytest.mark.slow
def test_memory_parts_of_a_step_and_overhead_are_measured(tmp_path: Path) -> None:
    """With little data: each contender as often as asked, and the machine's name."""
    table = tmp_path / "figures.json"
    printed = run("memory.py", "--repeats=1", "--steps=50", f"--json={table}")
    for name, (row,) in json.loads(table.read_text())["figures"].items():
        assert name in printed
        assert 0 < row["before"] < row["early"] < 2 * row["late"]
    printed = run("exactness.py", "--repeats=1", f"--json={table}")
    figures = json.loads(table.read_text())["figures"]
    assert figures.keys() >= {"weight of an uneven batch", "random numbers by sample"}
    assert all(name in printed for name in figures)
    printed = run("overhead.py", "--repeats=2", "--num-train=640", f"--json={table}")
    found = json.loads(table.read_text())
    assert set(found["figures"]) == {"by hand", "this project", "plain Lightning"}
    assert all(len(values) == 2 and min(values) > 0 for values in found["figures"].values())
    assert found["machine"] in printed
    assert "1.00 (1.00 - 1.00)" in printed  # the loop by hand against itself
