"""Sweeps whose settings Optuna makes up, with toy jobs: killed, failed, mistaken."""

import json
import random
import sys
import time
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.errors import UserError
from harness.sweeps.study import distribution, open_study, sampler_of, space_of
from tests.sweeps.test_driver import finish, results, start, trace, wait_for

pytest.importorskip("optuna")

WORDS = ["steps=range(5,15) seed=interval(0,1) kind=a,b"]


def test_killed_study_makes_up_what_is_left_and_failed_trials_count(tmp_path: Path) -> None:
    folder, draw = tmp_path / "sweep", random.Random(1)
    for _ in range(2):
        process = start(folder, WORDS, TRIALS="4")
        wait_for(folder, len(trace(folder)) + draw.randrange(15), process)
        time.sleep(draw.random() * 0.5)
        process.kill()
        process.communicate()
    status, said = finish(folder, WORDS, TRIALS="4")
    assert status == 0, said
    trials = open_study(folder, "toy", "min").trials
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert len(complete) == len(results(folder)) == 4
    assert "RUNNING" not in {trial.state.name for trial in trials}
    assert "again" not in [event for *_, event, _, _ in trace(folder)]
    for trial in complete:
        state = json.loads((folder / str(trial.number) / "state").read_text())
        assert len(state) == trial.params["steps"]
        assert trial.value == trial.params["seed"]
    assert finish(folder, [f"{WORDS[0]} fails=1"], TRIALS=str(len(trials) + 1))[0] == 1
    assert open_study(folder, "toy", "min").trials[-1].state.name == "FAIL"


def test_words_become_distributions_and_mistaken_settings_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for word, expected in {
        "lr=tag(log,interval(1e-4,1e-1))": "FloatDistribution(high=0.1, log=True, low=0.0001",
        "n=int(interval(1,9))": "IntDistribution(high=9, log=False, low=1",
        "x=range(0.1,0.9,0.2)": "FloatDistribution(high=0.7, log=False, low=0.1, step=0.2",
        "model=mlp,cnn": "CategoricalDistribution(choices=('mlp', 'cnn')",
    }.items():
        (override,) = OverridesParser.create().parse_overrides([word])
        assert str(distribution(override)).startswith(expected), word
    sampler = {"_target_": "optuna.samplers.RandomSampler", "constant_liar": True}
    with pytest.raises(UserError, match=r"'constant_liar'\nLeave out a setting .* ~sweep.sampler"):
        sampler_of(sampler)
    open_study(tmp_path, "toy", "min")
    with pytest.raises(UserError, match="does not seek mode=max"):
        open_study(tmp_path, "toy", "max")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install -e \.\[sweep\]"):
        space_of([])
