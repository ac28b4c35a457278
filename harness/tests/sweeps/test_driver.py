"""The driver of sweeps with toy jobs: killed at random moments, alone and with Optuna."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

SIX = [f"steps={10 + 3 * seed} seed={seed}" for seed in range(1, 7)]
SPACE = ["steps=range(5,15) seed=interval(0,1) kind=a,b"]


def start(folder: Path, jobs: list[str], **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.sweeps.toy_sweep", str(folder), "2", *jobs],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(folder: Path, jobs: list[str], **variables: str) -> tuple[int, str]:
    process = start(folder, jobs, **variables)
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


def trace(folder: Path) -> list[list[Any]]:
    path = folder / "trace"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def results(folder: Path) -> dict[str, Any]:
    return {
        path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/results.json")
    }


def overlapping(folder: Path) -> list[tuple[Any, Any]]:
    """Pairs of starts of jobs that ran at the same time: first and last moment, name, devices."""
    found: dict[str, list[list[Any]]] = {}
    for seconds, name, event, devices in trace(folder):
        if event == "start":
            found.setdefault(name, []).append([seconds, seconds, name, devices])
        found[name][-1][1] = seconds
    starts = [one for several in found.values() for one in several]
    return [(a, b) for a, b in combinations(starts, 2) if a[0] <= b[1] and b[0] <= a[1]]


def kill(folder: Path, jobs: list[str], draw: random.Random, **variables: str) -> None:
    """Start a driver, and kill it or one of its jobs at a random moment."""
    process = start(folder, jobs, **variables)
    num_events, end = len(trace(folder)) + draw.randrange(12), time.monotonic() + 60
    while len(trace(folder)) < num_events and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(draw.random() * 0.3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    pids = children.read_text().split() if children.exists() else []
    if pids and draw.random() < 0.5:
        os.kill(int(draw.choice(pids)), signal.SIGKILL)
    else:
        process.kill()
    process.communicate(timeout=60)


def test_each_job_runs_once_in_a_slot_of_its_own_and_kills_change_nothing(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    status, said = finish(undisturbed, SIX)
    assert status == 0, said
    assert results(undisturbed).keys() == {str(number) for number in range(6)}
    assert overlapping(undisturbed)
    draw = random.Random(1)
    for _ in range(3):
        kill(killed, SIX, draw)
    for _ in range(3):  # a job that was killed by itself is not started again by the same driver
        status, said = finish(killed, SIX)
    assert status == 0, said
    assert results(killed) == results(undisturbed)
    assert "again" not in [event for *_, event, _ in trace(killed)]  # none has run once more
    for one, two in (*overlapping(undisturbed), *overlapping(killed)):
        assert one[2] != two[2]
        assert one[3] != two[3]


@pytest.mark.parametrize("url", [None, "sqlite:///{}/shared.db"])
def test_killed_study_asks_for_what_is_left_and_failed_trials_count(
    url: str | None, tmp_path: Path
) -> None:
    optuna = pytest.importorskip("optuna")
    folder, draw = tmp_path / "toy" / "sweep", random.Random(1)
    variables = {"STORAGE": url.format(tmp_path)} if url else {}
    for _ in range(2):
        kill(folder, SPACE, draw, TRIALS="4", **variables)
    for _ in range(2):
        status, said = finish(folder, SPACE, TRIALS="4", **variables)
    assert status == 0, said
    storage = url.format(tmp_path) if url else f"sqlite:///{folder}/study.db"
    (summary,) = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=summary.study_name, storage=storage).trials
    assert summary.study_name == ("toy/sweep" if url else "toy")
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert len(complete) == len(results(folder)) == 4
    assert "again" not in [event for *_, event, _ in trace(folder)]
    for trial in complete:
        state = json.loads((folder / str(trial.number) / "state").read_text())
        assert len(state) == int(trial.params["steps"])
        assert trial.value == trial.params["seed"]
    assert finish(folder, [f"{SPACE[0]} fails=1"], TRIALS="5", **variables)[0] == 1
    trials = optuna.load_study(study_name=summary.study_name, storage=storage).trials
    assert {trial.state.name for trial in trials} == {"COMPLETE", "FAIL"}
