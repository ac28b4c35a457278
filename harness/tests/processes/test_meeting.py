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
from harness.processes import leaving, meeting
from harness.processes.launcher import Launcher
from harness.processes.meeting import Meeting, check_alike, differences

ALIKE: dict[str, Any] = {"seed": "1", "a.py": 1}
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
        known = Launcher("torchrun", num_processes=2, num_here=2)

        def be(rank: int) -> Any:
            try:
                kept.append(Meeting(replace(known, rank=rank), seconds / 60))
                with kept[-1] as one:
                    return do(one, rank)
            except UserError as error:
                return error

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(be, ranks))

    return run


def agree(one: Meeting, rank: int) -> dict[str, Any]:
    return one.agree(lambda: ALIKE, lambda: {"rank": rank})


def test_those_that_are_alike_agree_on_what_rank_0_chooses(meet: Meet, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1")

    def do(one: Meeting, rank: int) -> Any:
        chosen = agree(one, rank)
        one.check_shared(tmp_path)
        return chosen

    assert meet(do) == [{"rank": 0}, {"rank": 0}]
    assert meet(do) == [{"rank": 0}, {"rank": 0}]  # in the same store, as torchrun starts anew


def test_start_does_not_meet_one_that_was_killed_before(meet: Meet) -> None:
    """Rank 0 announced a round and died, and torchrun's store has kept it."""

    def leave_traces(one: Meeting, rank: int) -> None:
        one.store.set(f"{meeting.PREFIX}round", "old")
        one.store.set(f"{meeting.PREFIX}old/process/1", '["host", false, {"seed": "7"}]')

    meet(leave_traces, ranks=(0,))

    def late(one: Meeting, rank: int) -> dict[str, Any]:
        time.sleep(0.5 * (1 - rank))
        return agree(one, rank)

    assert meet(late) == [{"rank": 0}, {"rank": 0}]


def test_what_differs_ends_all(meet: Meet) -> None:
    def do(one: Meeting, rank: int) -> Any:
        return one.agree(lambda: {"seed": "2", "b.py": 2} if rank else ALIKE, dict)

    told = meet(do)
    assert [str(error) for error in told] == [str(told[0])] * 2
    host = socket.gethostname()
    says = f"Rank 1 on {host} has another a.py, another b.py, seed=2 instead of 1 (rank 0 on {host}"
    assert says in str(told[0])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_mistake_of_one_ends_all(failing: int, meet: Meet, tmp_path: Path) -> None:
    def do(one: Meeting, rank: int) -> None:
        agree(one, rank)
        if rank == failing:
            raise UserError("No such thing.")
        one.check_shared(tmp_path)

    told = [str(error) for error in meet(do)]
    assert told[failing] == "No such thing."
    host = socket.gethostname()
    assert told[1 - failing] == f"Rank {failing} on {host}: No such thing."


@pytest.mark.parametrize("missing", [0, 1])
def test_who_does_not_come_is_named(missing: int, meet: Meet) -> None:
    (error,) = meet(agree, ranks=(1 - missing,), seconds=1.0)
    assert f"rank {missing}" in str(error)
    assert "within join_minutes=" in str(error)


def test_folder_that_one_does_not_see_is_told(
    meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "SHARE_SECONDS", 0.2)
    for name in ("0", "1"):  # two folders that are copies, of which one goes on
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed: 1")
        (tmp_path / name / ".next_config.yaml").write_text(f"devices: {name}")

    def do(one: Meeting, rank: int) -> None:
        agree(one, rank)
        one.check_shared(tmp_path / str(rank))

    told = [str(error) for error in meet(do)]
    assert all("does not see" in text and "output_dir=" in text for text in told)


def test_failure_before_all_are_connected_ends_the_others(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    left: list[int] = []
    undone: list[int] = []

    def leave(status: int) -> None:
        left.append(status)
        threading.Event().wait()  # of its thread nothing more is heard

    monkeypatch.setattr(leaving, "leave", leave)
    monkeypatch.setattr(meeting, "WATCH_SECONDS", 0.05)

    def do(one: Meeting, rank: int) -> None:
        agree(one, rank)
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


def test_machine_that_hides_itself_is_refused_where_there_are_others() -> None:
    check_alike([("one", True, {}), ("one", True, {})])
    with pytest.raises(UserError, match=r"Rank 1 on two .*\nSet GLOO_SOCKET_IFNAME"):
        check_alike([("one", False, {}), ("two", True, {})])


def test_only_what_differs_is_a_difference() -> None:
    assert differences(ALIKE, ALIKE) == []
    assert differences({"torch": "2.6"}, {}) == ["torch=None instead of 2.6"]
