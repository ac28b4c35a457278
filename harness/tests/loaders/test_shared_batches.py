"""Every batch of anybody's sampler is shared: nothing is lost, repeated or drawn otherwise."""

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from harness.data.shared_batches import SharedBatchSampler
from tests.loaders.zoo import NUM_SAMPLES, ByLength, ByNumberOfTokens, Numbers

LENGTHS = Numbers().lengths
SAMPLERS = {
    "stock": lambda: BatchSampler(RandomSampler(range(NUM_SAMPLES)), 8, False),
    "by length": lambda: BatchSampler(ByLength(LENGTHS), 8, False),
    "by tokens": lambda: ByNumberOfTokens(LENGTHS),
}


def ranks(name: str, num_ranks: int, **more: Any) -> list[SharedBatchSampler]:
    return [
        SharedBatchSampler(SAMPLERS[name](), name, num_ranks=num_ranks, rank=rank, seed=3, **more)
        for rank in range(num_ranks)
    ]


def read(sampler: SharedBatchSampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return [list(batch) for batch in sampler]


@pytest.mark.parametrize("name", SAMPLERS)
def test_global_batches_do_not_depend_on_processes(name: str) -> None:
    (alone,) = ranks(name, 1)
    for num_ranks, num_micro_batches, epoch in product((1, 2, 3), (1, 3), (0, 1, 4)):
        shared = ranks(name, num_ranks, num_micro_batches=num_micro_batches)
        expected = read(alone, epoch)
        found = [read(sampler, epoch) for sampler in shared]
        assert len({len(batches) for batches in found}) == 1
        for step, batch in enumerate(expected):
            indices, weights = [], 0.0
            for micro in range(num_micro_batches):
                k = step * num_micro_batches + micro
                for sampler, batches in zip(shared, found, strict=True):
                    if not sampler.is_filler(k):
                        indices += batches[k]
                    weights += sampler.weight(k)
            assert indices == batch
            assert weights == pytest.approx(num_ranks * num_micro_batches)
            assert shared[0].num_before(step * num_micro_batches) == sum(map(len, expected[:step]))
    assert read(alone, 0) != read(alone, 1)


def test_what_others_draw_meanwhile_changes_nothing() -> None:
    """And the sampler takes nothing from the generators that dropout draws from."""
    sampler, undisturbed = ranks("by length", 1)[0], read(ranks("by length", 1)[0], 2)
    sampler.set_epoch(2)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = [torch.rand(()) for _ in range(5)]
    torch.manual_seed(0)
    found = []
    for batch in sampler:
        found.append(list(batch))
        assert torch.rand(()) == expected.pop(0)
    assert found == undisturbed


def test_an_epoch_begins_at_a_step() -> None:
    for name, step in product(SAMPLERS, (0, 1, 3)):
        whole, resumed = ranks(name, 1)[0], ranks(name, 1)[0]
        expected = read(whole, 5)
        resumed.start_at(5, step)
        resumed.expected = {step: whole.sums[step + 1]}
        assert [list(batch) for batch in resumed] == expected[step:]
        assert read(resumed, 6) == read(whole, 6)


def test_a_shorter_loader_goes_on_in_its_round() -> None:
    """Lightning begins it again beside a longer one, also after a resume in a later round."""
    whole, resumed = ranks("by tokens", 1)[0], ranks("by tokens", 1)[0]
    whole.set_epoch(1)
    rounds = [[list(batch) for batch in whole] for _ in range(3)]
    assert rounds[0] != rounds[1]
    num = len(rounds[0])
    for step in (num - 1, num, num + 2):
        resumed = ranks("by tokens", 1)[0]
        resumed.start_at(1, step)
        found = [list(batch) for batch in resumed]
        while len(found) < 3 * num - step:
            found += [list(batch) for batch in resumed]
        assert found == [batch for one in rounds for batch in one][step:]


def test_an_evaluation_gives_whole_batches_in_turn() -> None:
    for num_ranks, limit, epoch in product((1, 2, 3), (None, 3), (0, 3)):
        batches = BatchSampler(SequentialSampler(range(NUM_SAMPLES)), 8, False)
        how = {"num_ranks": num_ranks, "in_turn": True, "limit": limit}
        samplers = [SharedBatchSampler(batches, "x", rank=r, **how) for r in range(num_ranks)]
        found = [read(sampler, epoch) for sampler in samplers]
        turns = [len(batches) for batches in found]
        assert turns == [len(sampler) for sampler in samplers]
        assert len(set(turns)) == 1
        own = [
            batches[k]
            for k in range(turns[0])
            for sampler, batches in zip(samplers, found, strict=True)
            if not sampler.is_filler(k)
        ]
        expected = [list(range(i, min(i + 8, NUM_SAMPLES))) for i in range(0, NUM_SAMPLES, 8)]
        assert own == expected[:limit]
        sizes = [s.num_samples_in(k) for k in range(turns[0]) for s in samplers]
        physical = [len(batches[k]) for k in range(turns[0]) for batches in found]
        assert sizes == physical
