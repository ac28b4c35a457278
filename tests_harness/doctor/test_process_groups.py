"""Real processes: they add up, or the doctor says what to set."""

import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from harness.doctor import process_groups as this


def test_two_processes_add_up() -> None:
    section = this.gloo()
    assert section.problems == []
    assert section.values == {"works": True}


def test_interface_that_does_not_exist_is_told_with_one_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    section = this.gloo()
    assert section.values["works"] is False
    (problem,) = section.problems
    assert "nope" in problem.what
    assert f"It works with GLOO_SOCKET_IFNAME={this.LOOPBACK}" in problem.remedy


def never_ends(*_: object) -> None:
    time.sleep(600)


def test_processes_that_wait_for_each_other_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this, "LIMIT_SECONDS", 0.5)
    monkeypatch.setattr(this, "all_reduce", never_ends)
    assert "no answer after" in this.all_reduce_in_processes("gloo", ["cpu", "cpu"])
    assert multiprocessing.active_children() == []


def test_process_that_fails_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one would wait for it, until the limit, and then that would be said."""
    monkeypatch.setattr(this, "LIMIT_SECONDS", 150)
    assert "nope" in this.all_reduce_in_processes("gloo", ["cpu", "nope"])


def test_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: tensor[5:].add_(1))
    with pytest.raises(RuntimeError, match="The sum is 1 to 2, and should be 1"):
        this.all_reduce("gloo", "cpu", 0, 1, str(tmp_path), {})
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("devices", "errors", "works", "text"),
    [
        ([], [], None, "not tested: it needs a GPU"),
        (["cuda:0"], [""], True, "works: all-reduce of cuda:0"),
        (["cuda:1", "cuda:2", "cuda:3"], [""], True, "works: all-reduce of cuda:1 and cuda:2"),
        (["cuda:0"], ["NCCL WARN", "NCCL WARN"], False, "Run it with NCCL_DEBUG=INFO"),
        (["cuda:0", "cuda:1"], ["no sum", ""], False, "It works with NCCL_P2P_DISABLE=1"),
        (["cuda:0", "cuda:1"], ["no sum", "no sum"], False, "Run it with NCCL_DEBUG=INFO"),
    ],
)
def test_nccl_is_tried_with_what_there_is(devices, errors, works, text, monkeypatch) -> None:
    calls, answers = [], iter(errors)

    def add_up(backend: str, used: list[str], environment: object = None) -> str:
        calls.append((backend, used, environment))
        return next(answers)

    monkeypatch.setattr(this, "all_reduce_in_processes", add_up)
    section = this.nccl(devices)
    assert section.values["works"] is works
    told = section.text + "".join(problem.remedy for problem in section.problems)
    assert text in told
    assert bool(section.problems) == (works is False)
    assert [call[:2] for call in calls] == [("nccl", devices[:2])] * len(errors)
    assert [call[2] for call in calls[1:]] == [{"NCCL_P2P_DISABLE": "1"}] * (len(errors) - 1)


@pytest.mark.gpu
def test_nccl_works() -> None:
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    assert this.nccl(devices).values == {"works": True}
