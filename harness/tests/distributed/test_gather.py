"""Values of all ranks are gathered by one collective if they are small."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from harness.distributed import gather

LARGE = "x" * gather.SMALL


@pytest.mark.parametrize(
    ("values", "num_collectives"),
    [
        ([{"loss": (1, 0.5)}, None], 1),
        ([LARGE[:900], False], 1),
        ([LARGE, 1], 2),
        ([1, LARGE], 2),
    ],
)
def test_each_rank_gets_the_values_of_all(
    values: list[Any], num_collectives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, slots, called = threading.Barrier(2), [None, None], []
    this = threading.local()  # each thread is a rank

    def all_gather(found: list[Any], own: Any, _: Any) -> None:
        called.append(this.rank)
        slots[this.rank] = own
        barrier.wait(5)
        for rank, slot in enumerate(slots):
            if isinstance(own, Tensor):
                found[rank].copy_(slot)
            else:
                found[rank] = slot
        barrier.wait(5)

    def run(rank: int) -> list[Any]:
        this.rank = rank
        return gather.all_objects(values[rank], None)

    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_gather_object", all_gather)
    with ThreadPoolExecutor(2) as ranks:
        assert [*ranks.map(run, range(2))] == [values, values]
    assert len(called) == 2 * num_collectives
