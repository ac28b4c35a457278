"""Processes that meet, as threads; on two hosts and under Slurm: tests/cluster."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.distributed import rendezvous
from harness.distributed.launcher import Launcher
from harness.distributed.rendezvous import Rendezvous, check_equal
from harness.errors import UserError

ALIKE: dict[str, Any] = {"seed": "1", "a.py": 1}
Meet = Callable[..., list[Any]]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Meet:
    """Let processes call a function at a rendezvous; return each result or error."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    kept: list[Rendezvous] = []  # the store lives as long as that of rank 0

    def run(
        do: Callable[[Rendezvous, int], Any], ranks: tuple[int, ...] = (0, 1), seconds: float = 60.0
    ) -> list[Any]:
        def be(rank: int) -> Any:
            launcher = Launcher("torchrun", rank=rank, num_processes=2, num_here=2)
            try:
                kept.append(Rendezvous(launcher, seconds / 60))
                return do(kept[-1], rank)
            except UserError as error:
                return str(error)

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(be, ranks))

    return run


def agree(one: Rendezvous, rank: int) -> dict[str, Any]:
    return one.agree(lambda: ALIKE, lambda: {"rank": rank})


def test_those_that_are_alike_agree_on_what_rank_0_chooses(meet: Meet, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1")

    def do(one: Rendezvous, rank: int) -> Any:
        chosen = agree(one, rank)
        one.check_shared(tmp_path)
        return chosen

    assert meet(do) == [{"rank": 0}, {"rank": 0}]
    assert meet(do) == [{"rank": 0}, {"rank": 0}]  # in the same store, as torchrun restarts


def test_start_does_not_meet_one_that_failed_before(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(one: Rendezvous, rank: int) -> Any:
        return one.agree(lambda: {"seed": str(rank)}, dict)

    assert all("seed=1" in end for end in meet(refuse))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert meet(agree) == [{"rank": 0}, {"rank": 0}]


def test_what_differs_ends_all_with_the_first_difference(meet: Meet) -> None:
    def do(one: Rendezvous, rank: int) -> Any:
        return one.agree(lambda: {"seed": "2", "a.py": 2} if rank else ALIKE, dict)

    ends, host = meet(do), socket.gethostname()
    assert ends == [ends[0]] * 2
    assert ends[0].startswith(f"Rank 1 ({host}) and rank 0 ({host}) differ in a.py.")


def test_mistake_of_rank_0_ends_all(meet: Meet) -> None:
    def do(one: Rendezvous, rank: int) -> Any:
        def choose() -> dict[str, Any]:
            raise UserError("No such run.")

        return one.agree(lambda: ALIKE, choose)

    assert meet(do) == ["No such run.", f"Rank 0 on {socket.gethostname()}: No such run."]


@pytest.mark.parametrize("missing", [0, 1])
def test_who_does_not_come_is_named(missing: int, meet: Meet) -> None:
    (end,) = meet(agree, ranks=(1 - missing,), seconds=1.0)
    assert f"rank {missing}" in end
    assert "within join_minutes=" in end


def test_folder_that_one_does_not_see_is_told(
    meet: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "SHARE_SECONDS", 0.2)
    for name in ("0", "1"):  # two folders that are copies, of which one continues
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed: 1")
        (tmp_path / name / ".next_config.yaml").write_text(f"devices: {name}")

    def do(one: Rendezvous, rank: int) -> None:
        agree(one, rank)
        one.check_shared(tmp_path / str(rank))

    assert all("does not see" in text and "output_dir=" in text for text in meet(do))


def test_machine_that_hides_itself_is_refused_where_there_are_others() -> None:
    check_equal([("one", True, {}), ("one", True, {})])
    with pytest.raises(UserError, match=r"Rank 1 on two .*\nSet GLOO_SOCKET_IFNAME"):
        check_equal([("one", False, {}), ("two", True, {})])
