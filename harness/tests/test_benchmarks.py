"""The benchmarks run; what they measure is for people to read."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LIBRARY

FOLDER = LIBRARY / "benchmarks"


def test_every_benchmark_tells_its_usage(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    programs = [path for path in FOLDER.glob("*.py") if "__main__" in path.read_text()]
    assert len(programs) == 5
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
@pytest.mark.parametrize(
    "words",
    [
        ("overhead.py", "--num-train=640"),
        ("ddp.py", "--num-train=640", "--only", "by hand, 1", "by hand, 2", "ddp2(2x1)"),
        ("checkpoint.py", "--megabytes=1"),
        ("convert.py", "--gigabytes=0.01"),
    ],
)
def test_contenders_are_measured_with_little_data(words: tuple[str, ...], tmp_path: Path) -> None:
    """Each as often as asked, beside itself, and with the machine's name."""
    table = tmp_path / "figures.json"
    command = [sys.executable, words[0], *words[1:], "--repeats=2", f"--json={table}"]
    result = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    written = json.loads(table.read_text())
    figures = written["figures"]
    for name, values in figures.get("seconds", figures).items():
        assert f"| {name} |" in result.stdout
        assert len(values) == 2
        assert min(values) > 0
    assert written["machine"].split(", load")[0] in result.stdout
    assert "1.00 (1.00 to 1.00)" in result.stdout  # the first contender against itself
