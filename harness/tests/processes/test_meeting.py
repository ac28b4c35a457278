"""Processes that meet, as threads; on two hosts and under Slurm: tests/cluster."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.processes import leaving, meeting, messages
from harness.processes.launcher import Launcher
from harness.processes.meeting import Meeting, differences

ALIKE: dict[str, dict[str, Any]] = {"settings": {"seed": "1"}, "code": {"a.py": 1}, "versions": {}}
Meet = Callable[..., list[Any]]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Meet:
    """Let some processes do the same in a meeting; gives what each returns, or its mistake."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    kept: list[Meeting] = []  # the store lives as long as that of rank 0

    def run(
        do: Callable[[Meeting, int], Any], ranks: tuple[int, ...] = (0, 1), seconds: float = 60.0
    ) -> list[Any]:
        known = Launcher("srun", num_processes=2, num_here=2)

        def be(rank: int) -> Any:
            try:
                kept.append(Meeting(replace(known, rank=rank), seconds / 60))
                with kept[-1].telling_failure():
                    return do(kept[-1], rank)
            except UserError as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(be, ranks))

    return run


def test_those_that_are_alike_agree_on_what_the_first_decides(meet: Meet, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1")

    def do(one: Meeting, rank: int) -> Any:
        one.compare(ALIKE)
        chosen = one.decided(lambda: {"rank": rank})
        one.see(tmp_path)
        return chosen

    assert meet(do) == [{"rank": 0}, {"rank": 0}]


def test_what_differs_is_told_to_all(meet: Meet) -> None:
    other = {"settings": {"seed": "2"}, "code": {"b.py": 2}, "versions": {"torch": "2.6"}}
    told = meet(lambda one, rank: one.compare(other if rank else ALIKE))
    assert [str(error) for error in told] == [str(told[0])] * 2
    says = "seed=2 instead of 1; no a.py; b.py besides; torch 2.6 instead of none"
    assert f"Rank 1 on {socket.gethostname()} has {says} (rank 0 on" in str(told[0])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_mistake_of_one_ends_all(failing: int, meet: Meet) -> None:
    def do(one: Meeting, rank: int) -> None:
        one.compare(ALIKE)
        if rank == failing:
            raise UserError("No such thing.")
        one.decided(dict) if rank else one.messages.hear("seen/1")

    told = [str(error) for error in meet(do)]
    assert told[failing] == "No such thing."
    assert told[1 - failing].endswith("No such thing.")
    assert ("Rank 1" in told[0]) == (failing == 1)


@pytest.mark.parametrize("missing", [0, 1])
def test_who_does_not_come_is_named(
    missing: int, meet: Meet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(messages, "SAY_SECONDS", 0.1)
    (error,) = meet(lambda one, rank: None, ranks=(1 - missing,), seconds=1.0)
    assert f"Rank {missing}" in str(error)
    assert "did not answer within join_minutes" in str(error)
    assert f"s for rank {missing}" in capsys.readouterr().err


def test_folder_that_one_does_not_see_is_told(
    meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "SEE_SECONDS", 0.2)
    for name in ("0", "1"):  # two folders that are copies, of which one goes on
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed: 1")
        (tmp_path / name / ".next_config.yaml").write_text(f"devices: {name}")
    told = [str(error) for error in meet(lambda one, rank: one.see(tmp_path / str(rank)))]
    assert all("does not see" in text and "output_dir=" in text for text in told)


def test_failure_before_all_are_connected_ends_those_that_wait(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left: list[int] = []
    undone: list[int] = []

    def leave(status: int) -> None:
        left.append(status)
        threading.Event().wait()  # of its thread nothing more is heard

    monkeypatch.setattr(leaving, "leave", leave)
    monkeypatch.setattr(meeting, "WATCH_SECONDS", 0.05)
    leaving.connected.clear()

    def do(one: Meeting, rank: int) -> None:
        one.watch(lambda: undone.append(rank))
        if rank == 1:
            raise UserError("No data here.")

    meet(do)
    end = time.monotonic() + 60
    while len(left) < 2 and time.monotonic() < end:  # else the real one would end the tests
        time.sleep(0.01)
    leaving.connected.set()
    assert left == [1, 1]
    assert len(undone) == 2
    assert "No data here." in capfd.readouterr().err


def test_many_differences_are_counted() -> None:
    many = {"settings": {str(i): i for i in range(10)}, "code": {}, "versions": {}}
    assert differences({**many, "settings": {}}, many)[-1] == "4 more"
    assert differences(many, many) == []
    assert differences({"code": {"a.py": 1}}, {"code": {"a.py": 2}}) == ["another a.py"]
