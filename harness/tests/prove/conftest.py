"""Commands that are forked from one program, which has imported what they need."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.prove import runs
from harness.prove.compare import Verdict, prove
from harness.prove.runs import Runs
from tests.faults.fork_server import Forked
from tests.strategy_runs import write_conf

Prove = Callable[..., dict[str, Verdict]]


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
    """Prove a module of the tests; its verdicts by name."""

    def run(
        module: type[Any], *strategies: str, dataset: str = "Flowers", more: tuple[str, ...] = ()
    ) -> dict[str, Verdict]:
        model = f"_target_: {module.__module__}.{module.__name__}\n"
        data = f"_target_: tests.modules.data.Data\ndataset: {dataset}\n"
        words = [*write_conf(tmp_path, data=data, model=model), *more]
        folder = tmp_path / f"runs_{len([*tmp_path.iterdir()])}"
        return {one.name: one for one in prove(Runs(words, folder), strategies).verdicts}

    return run
