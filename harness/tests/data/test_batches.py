"""A data set gets the epoch and seeded generators with the indices of a batch."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from harness.data.batches import BatchedDataset
from harness.data.datamodule import identity_collate
from harness.data.loaders import rebuild_loader
from harness.data.shared_batches import SharedBatchSampler
from tests.loaders.zoo import ByLength


class Indices(BatchedDataset):
    """Returns what it was asked for."""

    def __len__(self) -> int:
        return 20

    def __getitems__(self, indices: list[int]) -> tuple[list[int], int]:
        return list(indices), self.epoch_of(indices)


class Random(Dataset[Tensor]):
    """Returns the index, and what all kinds of generators give."""

    def __init__(self) -> None:
        self.own = np.random.default_rng()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        drawn = (random.random(), np.random.rand(), float(torch.rand(())), self.own.random())
        return torch.tensor([index, *drawn], dtype=torch.float64)


def read(epoch: int = 0, seed: int = 1, num_workers: int = 0) -> Tensor:
    """Read all samples in a random order; shape (10, 5), sorted by their indices."""
    dataset = Random()
    batches = BatchSampler(RandomSampler(dataset), 4, False)
    sampler = SharedBatchSampler(batches, "random", dataset=dataset, seed=seed)
    sampler.set_epoch(epoch)
    loader = DataLoader(dataset, num_workers=num_workers)
    rows = torch.cat(
        [*rebuild_loader(loader, dataset, batch_sampler=sampler, collate_fn=torch.stack)]
    )
    return rows[rows[:, 0].argsort()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epoch_reaches_the_data_set_in_every_worker(num_workers: int) -> None:
    sampler = SharedBatchSampler(BatchSampler(range(20), 6, False), "in order")
    sampler.set_epoch(4)
    how = {"num_workers": num_workers, "collate_fn": identity_collate}
    batches = [*DataLoader(Indices(), batch_sampler=sampler, **how)]
    assert {epoch for _, epoch in batches} == {4}
    assert list(itertools.chain(*(indices for indices, _ in batches))) == list(range(20))


def test_draws_belong_to_seed_epoch_and_sample() -> None:
    """In whichever worker, and whatever was read before."""
    whole = read()
    assert torch.equal(read(num_workers=2), whole)
    for other in (read(epoch=1), read(seed=2)):
        assert (other[:, 1:] != whole[:, 1:]).all()


@pytest.mark.parametrize("kind", [RandomSampler, ByLength])
def test_reading_and_what_others_draw_meanwhile_do_not_change_each_other(kind: Any) -> None:
    """Without workers, dropout draws from the same generators."""
    dataset = Random()
    batches = BatchSampler(kind([*range(10)]), 2, False)
    sampler = SharedBatchSampler(batches, "random", dataset=dataset, cycles=False)
    loader = rebuild_loader(DataLoader(dataset), dataset, batch_sampler=sampler)
    expected = [*loader]
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    drawn, reading = torch.rand(5), iter(loader)
    torch.manual_seed(0)
    for batch, wanted, draw in zip(reading, expected, drawn, strict=True):
        assert torch.equal(batch, wanted)
        assert torch.rand(()) == draw
