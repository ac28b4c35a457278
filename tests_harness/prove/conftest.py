"""Commands that are forked from one program, which has imported what they need."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.prove import runs
from harness.prove.promises import Proof, prove
from tests_harness.faults.fork_server import Forked
from tests_harness.prove import modules

Prove = Callable[..., Proof]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the runs of a proof fast."""

    def start_program(*given: Any) -> Forked:
        with warnings.catch_warnings():
            warnings.resetwarnings()  # to a user a warning is no error
            return Forked(*given)

    monkeypatch.setattr(runs, "start_program", start_program)


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
        folder = tmp_path / f"runs_{len([*tmp_path.iterdir()])}"
        folder.mkdir()
        return prove(words, folder, strategies=strategies, precision=precision)

    return run
