"""Sweeps whose settings Optuna makes up, with toy jobs: killed, failed, mistaken."""

import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.errors import UserError
from harness.sweeps.study import distribution, opened
from tests_harness.sweeps.test_driver import finish, results, start, trace, wait_for
from tests_harness.sweeps.toy_sweep import STUDY

pytest.importorskip("optuna")

WORDS = ["steps=range(5,15) seed=interval(0,1) kind=a,b"]


def states(folder: Path) -> Counter[str]:
    return Counter(trial.state.name for trial in opened(folder, "toy", "min", STUDY).trials)


def storm(folder: Path, num_trials: int, num_kills: int, seed: int) -> None:
    """Kill the driver at random moments; the last one goes to the end."""
    draw = random.Random(seed)
    for _ in range(num_kills):
        process = start(folder, WORDS, TRIALS=str(num_trials))
        wait_for(folder, len(trace(folder)) + draw.randrange(15), process)
        time.sleep(draw.random() * 0.5)
        process.kill()
        process.communicate()
    status, said = finish(folder, WORDS, TRIALS=str(num_trials))
    assert status == 0, said
    assert states(folder)["COMPLETE"] == len(results(folder)) == num_trials
    assert states(folder)["RUNNING"] == 0
    assert "again" not in [event for *_, event, _, _ in trace(folder)]
    for trial in opened(folder, "toy", "min", STUDY).trials:
        if trial.state.name == "COMPLETE":
            state = json.loads((folder / str(trial.number) / "state").read_text())
            assert len(state) == trial.params["steps"]
            assert trial.value == trial.params["seed"]


def test_killed_study_makes_up_what_is_left(tmp_path: Path) -> None:
    storm(tmp_path / "sweep", num_trials=4, num_kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_many_kills_of_a_study(seed: int, tmp_path: Path) -> None:
    storm(tmp_path / "sweep", num_trials=8, num_kills=5, seed=seed)


def test_failed_trial_counts(tmp_path: Path) -> None:
    """And it stays, where the study goes on for more."""
    folder, failing = tmp_path / "sweep", [f"{WORDS[0]} fails=1"]
    assert finish(folder, failing, TRIALS="2")[0] == 1
    assert states(folder) == {"FAIL": 2}
    assert finish(folder, WORDS, TRIALS="3")[0] == 1
    assert states(folder) == {"FAIL": 2, "COMPLETE": 1}
    assert results(folder).keys() == {"2"}


def test_words_become_distributions() -> None:
    for word, expected in {
        "lr=tag(log,interval(1e-4,1e-1))": "FloatDistribution(high=0.1, log=True, low=0.0001",
        "lr=interval(0,1)": "FloatDistribution(high=1.0, log=False, low=0.0",
        "n=int(interval(1,9))": "IntDistribution(high=9, log=False, low=1",
        "n=range(1,10,3)": "IntDistribution(high=7, log=False, low=1, step=3",
        "x=range(0.1,0.9,0.2)": "FloatDistribution(high=0.7, log=False, low=0.1, step=0.2",
        "model=mlp,cnn": "CategoricalDistribution(choices=('mlp', 'cnn')",
    }.items():
        (override,) = OverridesParser.create().parse_overrides([word])
        assert str(distribution(override)).startswith(expected), word


def test_mistaken_settings_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(hint: str, folder: Path, mode: str, settings: dict[str, Any]) -> None:
        with pytest.raises(UserError, match=hint):
            opened(folder, "toy", mode, settings)

    sampler = {"_target_": "optuna.samplers.RandomSampler", "constant_liar": True}
    hint = r"'constant_liar'\nLeave out a setting .* with ~sweep.sampler"
    refused(hint, tmp_path, "min", {"sampler": sampler})
    opened(tmp_path, "toy", "min", STUDY)
    refused("does not seek mode=max", tmp_path, "max", STUDY)
    (tmp_path / "study.db").write_text("no database at all, and long enough to be none" * 9)
    refused(f"{re.escape(str(tmp_path))}/study.db: the study cannot", tmp_path, "min", STUDY)
    monkeypatch.setitem(sys.modules, "optuna", None)
    refused(r"pip install -e \.\[sweep\]", tmp_path, "min", STUDY)
