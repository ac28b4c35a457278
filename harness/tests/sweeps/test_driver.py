"""The driver of sweeps with toy jobs: it survives, fills the machine, fails with none of them."""

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

from harness.machine.limits import usable_cores
from tests.conftest import ROOT
from tests.machine.fake_nvml import FakeGpu, write_fake

SIX = [f"steps={10 + 3 * seed} seed={seed}" for seed in range(1, 7)]


def start(
    folder: Path, jobs: list[str], num: int = 2, num_gpus: int = 0, **variables: str
) -> "subprocess.Popen[str]":
    line = [sys.executable, "-m", "tests.sweeps.toy_sweep", str(folder), str(num)]
    return subprocess.Popen(
        [*line, str(num_gpus), *jobs],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*arguments: Any, **more: Any) -> tuple[int, str]:
    process = start(*arguments, **more)
    said, _ = process.communicate(timeout=120)
    return process.returncode, said


def trace(folder: Path) -> list[list[Any]]:
    path = folder / "trace"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def results(folder: Path) -> dict[str, Any]:
    return {
        path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/results.json")
    }


def intervals(folder: Path) -> list[list[Any]]:
    """Of each start of a job: its first and last moment, its name, devices and threads."""
    found: dict[str, list[list[Any]]] = {}
    for seconds, name, event, devices, threads in trace(folder):
        if event == "start":
            found.setdefault(name, []).append([seconds, seconds, name, devices, threads])
        found[name][-1][1] = seconds
    return [one for starts in found.values() for one in starts]


def overlapping(*folders: Path) -> list[tuple[Any, Any]]:
    every = [one for folder in folders for one in intervals(folder)]
    return [(a, b) for a, b in combinations(every, 2) if a[0] <= b[1] and b[0] <= a[1]]


def wait_for(folder: Path, num_events: int, process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 60
    while len(trace(folder)) < num_events and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)


def test_jobs_run_side_by_side_each_with_its_threads_and_kills_change_nothing(
    tmp_path: Path,
) -> None:
    undisturbed = tmp_path / "undisturbed"
    status, said = finish(undisturbed, SIX)
    assert status == 0, said
    assert results(undisturbed).keys() == {str(number) for number in range(6)}
    assert overlapping(undisturbed)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // 2)))
    assert {one[4] for one in intervals(undisturbed)} == {threads}
    starts = intervals(undisturbed)
    assert max(sum(a[0] <= b[0] <= a[1] for a in starts) for b in starts) == 2
    storm(tmp_path / "killed", results(undisturbed), num_kills=3, seed=1)


def storm(folder: Path, expected: dict[str, Any], num_kills: int, seed: int) -> None:
    """Kill the driver or a job at random moments, and go on each time."""
    draw = random.Random(seed)
    for _ in range(num_kills):
        process = start(folder, SIX)
        wait_for(folder, len(trace(folder)) + draw.randrange(12), process)
        time.sleep(draw.random() * 0.3)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        pids = children.read_text().split() if children.exists() else []
        if pids and draw.random() < 0.5:
            os.kill(int(draw.choice(pids)), signal.SIGKILL)
        else:
            process.kill()
        process.communicate(timeout=60)
    for _ in range(3):  # a job that was killed by itself is not started again by the same driver
        status, said = finish(folder, SIX)
    assert status == 0, said
    assert results(folder) == expected
    events = [event for *_, event, _, _ in trace(folder)]
    assert "again" not in events  # no finished job has run once more
    assert not [pair for pair in overlapping(folder) if pair[0][2] == pair[1][2]]


def test_two_jobs_are_never_on_one_gpu_and_one_that_waits_says_so(tmp_path: Path) -> None:
    """Also under two drivers, of which one is killed while its jobs save."""
    gpus = write_fake(tmp_path / "fake", [FakeGpu(70 + number) for number in range(3)])
    gpus["PYTHONPATH"] = f"{gpus['PYTHONPATH']}:{os.environ['PYTHONPATH']}"
    jobs = [f"steps={10 + 4 * number} gpus={1 + number % 2}" for number in range(5)]
    folders = [tmp_path / "one", tmp_path / "two"]
    first = start(folders[0], jobs, 0, 1, **gpus)
    wait_for(folders[0], 8, first)
    second = start(folders[1], jobs, 0, 1, **gpus)
    time.sleep(0.7)
    first.kill()
    first.communicate()
    again = start(folders[0], jobs, 0, 1, **gpus)
    for process in (second, again):
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
    devices = [one[3].split(",") for folder in folders for one in intervals(folder)]
    assert {len(names) for names in devices} == {1, 2}
    for one, two in overlapping(*folders):
        assert not {*one[3].split(",")} & {*two[3].split(",")}, (one, two)

    first = start(tmp_path / "three", ["steps=60 gpus=3"], 0, 1, **gpus)
    wait_for(tmp_path / "three", 1, first)
    status, said = finish(tmp_path / "four", ["steps=1 gpus=1"], 0, 1, **gpus)
    first.communicate(timeout=60)
    assert status == 0, said
    assert said.count("Waits for room for job 0.") == 1, said
