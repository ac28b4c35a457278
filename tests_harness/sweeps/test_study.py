"""Sweeps whose settings Optuna makes up, with toy jobs: killed, shared, tried again, pruned."""

import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from harness.errors import UserError
from harness.sweeps.jobs import Job
from harness.sweeps.study import distribution, opened
from tests_harness.sweeps.test_driver import finish, results, start, trace, wait_for
from tests_harness.sweeps.toy_sweep import STUDY

optuna = pytest.importorskip("optuna")

WORDS = ["steps=range(5,15) seed=interval(0,1) kind=a,b"]


def states(folder: Path, **settings: Any) -> Counter[str]:
    study = opened(folder, "toy", "min", STUDY | settings)
    return Counter(trial.state.name for trial in study.trials)


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
            state = json.loads((folder / trial.user_attrs["job"] / "state").read_text())
            assert len(state) == trial.params["steps"]
            assert trial.value == trial.params["seed"]


def test_killed_study_makes_up_what_is_left(tmp_path: Path) -> None:
    storm(tmp_path / "sweep", num_trials=6, num_kills=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_many_kills_of_a_study(seed: int, tmp_path: Path) -> None:
    storm(tmp_path / "sweep", num_trials=8, num_kills=5, seed=seed)


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_drivers_share_a_study(kind: str, tmp_path: Path) -> None:
    place = f"sqlite:///{tmp_path}/x.db" if kind == "sqlite" else f"{tmp_path}/x.journal"
    settings = {"TRIALS": "7", "SETTINGS": json.dumps({"storage": place})}
    opened(tmp_path, "toy", "min", STUDY | {"storage": place})
    folders = [tmp_path / "one", tmp_path / "two"]
    first, second = (start(folder, WORDS, **settings) for folder in folders)
    wait_for(folders[0], 6, first)
    first.kill()
    first.communicate()
    second.communicate(timeout=100)
    assert second.returncode == 0
    status, said = finish(folders[0], WORDS, **settings)
    assert status == 0, said
    assert states(tmp_path, storage=place)["COMPLETE"] == 7
    there = [results(folder).keys() for folder in folders]
    assert len(there[0]) + len(there[1]) == len(there[0] | there[1]) == 7
    assert there[0]
    assert there[1]


def test_failed_trial_counts_and_is_tried_again_when_asked(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    failing, mended = ([f"{WORDS[0]} fails={number}"] for number in (1, 0))
    assert finish(folder, failing, TRIALS="2")[0] == 1
    assert states(folder) == {"FAIL": 2}
    assert finish(folder, failing, TRIALS="2")[0] == 1
    assert states(folder) == {"FAIL": 2}
    status, said = finish(folder, mended, TRIALS="2", RETRY="1")
    assert status == 0, said
    assert states(folder) == {"FAIL": 2, "COMPLETE": 2}
    assert results(folder).keys() == {"0", "1"}


def test_hopeless_trial_is_pruned(tmp_path: Path) -> None:
    """And a finished study is not gone on with, nor the pruned job."""
    folder = tmp_path / "sweep"
    folder.mkdir()
    study = opened(folder, "toy", "min", STUDY)
    for seed in (1, 2, 1, 2, 1):
        study.enqueue_trial({"seed": seed, "steps": 5})
    study.enqueue_trial({"seed": 9, "steps": 400})
    words = ["steps=int(interval(1,500)) seed=int(interval(1,9))"]
    more = {"TRIALS": "6", "SETTINGS": json.dumps({"pruner": "median"})}
    status, said = finish(folder, words, 1, **more)
    assert status == 0, said
    assert "job 5 pruned after" in said
    assert "val/loss is worse than the median of earlier jobs" in said
    assert states(folder) == {"COMPLETE": 5, "PRUNED": 1}
    assert Job(5, [], folder / "5").status == "pruned"
    before = len(trace(folder))
    assert finish(folder, words, 1, **more)[0] == 0
    assert len(trace(folder)) == before


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("lr=tag(log,interval(1e-4,1e-1))", "FloatDistribution(high=0.1, log=True, low=0.0001"),
        ("lr=interval(0,1)", "FloatDistribution(high=1.0, log=False, low=0.0"),
        ("n=int(interval(1,9))", "IntDistribution(high=9, log=False, low=1"),
        ("n=range(1,10,3)", "IntDistribution(high=7, log=False, low=1, step=3"),
        ("x=range(0.1,0.9,0.2)", "FloatDistribution(high=0.7, log=False, low=0.1, step=0.2"),
        ("model=mlp,cnn", "CategoricalDistribution(choices=('mlp', 'cnn')"),
    ],
)
def test_words_become_distributions(word: str, expected: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([word])
    assert str(distribution(override)).startswith(expected)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"storage": "nosuchdb://x/y"}, "sweep.storage=nosuchdb://x/y: the study cannot be opened"),
        ({"pruner": "mean"}, "sweep.pruner=mean: use median or null."),
        (
            {"sampler": {"_target_": "optuna.samplers.RandomSampler", "constant_liar": True}},
            r"'constant_liar'\nLeave out a setting .* with ~sweep.sampler",
        ),
    ],
)
def test_mistaken_settings_are_told(settings: dict[str, Any], hint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=hint):
        opened(tmp_path, "toy", "min", STUDY | settings)


def test_study_of_the_other_direction_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, "toy", "min", STUDY)
    with pytest.raises(UserError, match="does not seek mode=max"):
        opened(tmp_path, "toy", "max", STUDY)


def test_missing_optuna_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install -e \.\[sweep\]"):
        opened(tmp_path, "toy", "min", STUDY)
