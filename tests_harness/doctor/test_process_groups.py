"""Real processes: they add up, or the doctor says what to set."""

import os

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


def test_processes_that_wait_for_each_other_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this, "LIMIT_SECONDS", 0.5)
    started: list[int] = []
    popen = this.subprocess.Popen
    monkeypatch.setattr(
        this.subprocess, "Popen", lambda *a, **k: started.append((p := popen(*a, **k)).pid) or p
    )
    # Of three announced processes one never comes.
    assert "no sum after" in this.all_reduce_in_processes(
        "gloo", ["cpu", "cpu"], {"WORLD_SIZE": "3"}
    )
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_process_that_fails_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one would wait for it, until the limit, and then that would be said."""
    monkeypatch.setattr(this, "LIMIT_SECONDS", 150)
    assert "nope" in this.all_reduce_in_processes("gloo", ["cpu", "nope"])


def test_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor: tensor[5:].add_(1))
    with pytest.raises(SystemExit, match="The sum is 1 to 2, and should be 1"):
        this.all_reduce("gloo", "cpu")


@pytest.mark.parametrize(
    ("devices", "errors", "works", "text"),
    [
        ([], [], None, "not tested: it needs a GPU"),
        (["cuda:0"], [""], True, "works with one process; two need a second GPU"),
        (["cuda:1", "cuda:2", "cuda:3"], [""], True, "works: all-reduce of cuda:1 and cuda:2"),
        (["cuda:0"], ["NCCL WARN"], False, "Run it with NCCL_DEBUG=INFO"),
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
