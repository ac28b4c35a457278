"""Large data sets: torch's shuffled order from a tensor, and a resume that skips at once."""

import tracemalloc
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from harness.data import stock_order
from harness.data.shared_batches import SharedBatchSampler
from harness.data.stock_order import ShuffledBatches, is_stock_shuffle

CASES: list[dict[str, Any]] = [
    {},
    {"num_samples": 10},
    {"num_samples": 100},
    {"num_samples": 74},
    {"generator": torch.Generator()},
]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("settings", CASES)
def test_the_batches_are_those_of_torch(settings: dict[str, Any], drop_last: bool) -> None:
    batches = BatchSampler(RandomSampler(range(37), **settings), 4, drop_last)

    def seed() -> None:
        torch.manual_seed(3)
        settings.get("generator", torch.Generator()).manual_seed(4)

    seed()
    expected = [*batches]
    seed()
    shuffled = ShuffledBatches(batches)
    assert [*shuffled.iterate()] == expected
    assert len(shuffled) == len(expected) == len(batches)
    for first in range(len(expected) + 2):
        assert [*shuffled.iterate(first)] == expected[first:]


def test_a_sampler_of_the_users_own_is_iterated() -> None:
    class Mine(RandomSampler):
        pass

    of = {
        "stock": BatchSampler(RandomSampler(range(9)), 4, False),
        "mine": BatchSampler(Mine(range(9)), 4, False),
        "drawn with replacement": BatchSampler(RandomSampler(range(9), True), 4, False),
        "sequential": BatchSampler(SequentialSampler(range(9)), 4, False),
    }
    assert [name for name, batches in of.items() if is_stock_shuffle(batches)] == ["stock"]


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("micro", [1, 2])
def test_an_epoch_resumed_at_any_step_has_the_same_batches(
    rounds: int, micro: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> SharedBatchSampler:
        batches = BatchSampler(RandomSampler(range(37)), 4, False)
        return SharedBatchSampler(batches, "loader", num_ranks=2, rank=1, num_micro_batches=micro)

    def epoch(sampler: SharedBatchSampler) -> list[list[int]]:
        return [[*batch] for _ in range(rounds) for batch in sampler]

    whole = make()
    expected = epoch(whole)
    for step in range(len(expected) // micro):
        stopped = make()
        [*islice((batch for _ in range(rounds) for batch in stopped), (step + 1) * micro)]
        resumed = make()
        resumed.start_at(0, step, stopped.state_at(0, step))
        num_left = len(expected) - step * micro
        found = [[*batch] for _ in range(rounds) for batch in resumed][:num_left]
        assert found == expected[step * micro :]
        last = len(expected) - 1
        assert resumed.counts(last) == whole.counts(last)
        assert resumed.num_before(last) == whole.num_before(last)
        if rounds == 1:  # ``resumed`` has drawn no further round
            assert resumed.first == whole.first
            assert resumed.sums[-1] == whole.sums[-1]
    assert not caplog.messages


def test_a_checkpoint_of_other_batches_is_found(caplog: pytest.LogCaptureFixture) -> None:
    batches = BatchSampler(RandomSampler(range(37)), 4, False)
    sampler = SharedBatchSampler(batches, "loader", seed=1)
    sampler.start_at(0, 5, {"checksum": 7})
    next(iter(sampler))
    assert "draws other batches" in caplog.text


def test_a_large_epoch_makes_no_list_of_all_its_samples() -> None:
    """Tensors are not traced: they hold eight bytes per sample."""
    num = 300_000
    for is_evaluation in (False, True):
        order = SequentialSampler(range(num)) if is_evaluation else RandomSampler(range(num))
        sampler = SharedBatchSampler(
            BatchSampler(order, 100, False), "loader", is_round_robin=is_evaluation
        )
        tracemalloc.start()
        sampler.start_at(0, 2_000 * (not is_evaluation))
        next(iter(sampler))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < num * 10
    assert num > stock_order.BATCHES_PER_BLOCK * 100
