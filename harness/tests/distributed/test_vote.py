"""Two processes played in one, with a clock of their own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.distributed import vote
from harness.distributed.gather import host_group
from harness.distributed.vote import Vote


class Two:
    """Two processes that vote; a round has ended when both have asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.rounds: list[list[torch.Tensor]] = [[]]
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "new_group", lambda backend: "group")
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(vote, "time", SimpleNamespace(monotonic=lambda: self.now))
        trainer: Any = SimpleNamespace(world_size=2)
        self.ranks = [Vote(trainer), Vote(trainer)]

    def all_reduce(self, votes: torch.Tensor, op: Any, group: str, async_op: bool) -> Any:
        if len(self.rounds[-1]) == 2:
            self.rounds.append([])
        asked = self.rounds[-1]
        asked.append(votes.clone())

        def wait() -> None:
            assert len(asked) == 2, "one process waits for a question that the other never asked"
            votes.copy_(torch.stack(asked).amax(dim=0))

        return SimpleNamespace(wait=wait)

    def step(self, seconds: float, *values: int) -> list[list[int] | None]:
        """One step; each process asks one value."""
        self.now += seconds
        return [rank.ask(value) for rank, value in zip(self.ranks, values, strict=True)]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Two:
    return Two(monkeypatch)


def test_both_get_the_largest_value_at_the_same_step(two: Two) -> None:
    assert two.step(1.0, 0, 15) == [None, None]
    assert two.step(1.0, 0, 0) == [[15], [15]]
    assert two.step(1.0, 0, 0) == [[0], [0]]


def test_short_steps_ask_less_often(two: Two) -> None:
    for _ in range(1000):
        two.step(0.005, 0, 0)
    assert 100 <= len(two.rounds) <= 110  # no more than ten steps at once


def test_no_signal_waits_for_more_than_twenty_steps(two: Two) -> None:
    for _ in range(1000):
        two.step(1e-6, 0, 0)
    answers = [two.step(30.0, 0, 9) for _ in range(20)]  # steps that take long all at once
    assert [[9], [9]] in answers


def test_what_processes_gather_goes_from_host_to_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, through NCCL, would have to fit each device."""
    made = []

    class Group:
        pass

    def new_group(backend: str) -> str:
        made.append(backend)
        return backend

    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=Group()))
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert (host_group(), made) == (None, [])
    monkeypatch.setattr(dist.group, "WORLD", Group())
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert [host_group(), host_group()] == ["gloo", "gloo"]
    assert made == ["gloo"]
