"""Commands that are forked from one program, which has imported what they need."""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.prove import runs
from harness.prove.promises import Proof, prove
from tests_harness.faults import fast_command
from tests_harness.prove import modules

Prove = Callable[..., Proof]


class Forked(fast_command.Forked):
    """A command with its two streams in files."""

    def __init__(self, arguments: list[str], env: dict[str, str], path: Path) -> None:
        self.returncode = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number, suffix in ((1, ".out"), (2, ".err")):
                flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
                os.dup2(os.open(path.with_suffix(suffix), flags), number)
            # Not pytest's, which write elsewhere.
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            warnings.resetwarnings()
            fast_command.run_command(arguments, env)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the runs of a proof fast."""
    monkeypatch.setattr(runs, "start_program", Forked)


@pytest.fixture
def prove_module(forked: None, tmp_path: Path) -> Prove:
    """Prove a module of this folder; all promises that are not of a strategy as well."""

    def run(
        module: type[Any], *strategies: str, fault: bool, kind: str = "points", **more: Any
    ) -> Proof:
        words, precision = more.pop("words", []), more.pop("precision", "auto")
        conf = tmp_path / "conf"
        texts = {
            "model": f"_target_: {modules.__name__}.{module.__name__}\nfault: {fault}\n"
            + "".join(f"{key}: {value}\n" for key, value in more.items()),
            "data": f"_target_: {modules.__name__}.Data\nkind: {kind}\n",
        }
        for group, text in texts.items():
            (conf / group).mkdir(parents=True, exist_ok=True)
            (conf / group / "mine.yaml").write_text(text)
        words = [f"hydra.searchpath=[file://{conf}]", "data=mine", "model=mine", *words]
        return prove(words, tmp_path / "runs", strategies=strategies, precision=precision)

    return run
