"""The benchmarks run; what they measure is for people to read."""

import runpy
import sys

import pytest

from tests.conftest import LIBRARY

FOLDER = LIBRARY / "benchmarks"


def test_every_benchmark_tells_its_usage(monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    programs = [path for path in FOLDER.glob("*.py") if "__main__" in path.read_text()]
    assert len(programs) == 11
    for path in programs:
        monkeypatch.setattr(sys, "argv", [path.name, "--help"])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(path), run_name="__main__")
        assert f"python benchmarks/{path.name}" in capsys.readouterr().out
