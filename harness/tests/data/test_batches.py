"""What reaches a data set with the indices of a batch: the epoch, and seeded generators."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
)

from harness.data.batches import Batch, BatchedDataset
from harness.data.loaders import _batches_of, rebuilt
from harness.data.randomness import generator_states, same_states
from harness.data.shared_batches import SharedBatchSampler
from harness.errors import UserError


class Indices(BatchedDataset):
    """Returns what it was asked for."""

    def __len__(self) -> int:
        return 20

    def __getitems__(self, indices: list[int]) -> tuple[list[int], int]:
        assert isinstance(indices, Batch)
        return list(indices), indices.epoch


class Random(Dataset[Tensor]):
    """Returns the index, and what all kinds of generators give."""

    def __init__(self) -> None:
        self.own = np.random.default_rng()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        drawn = (random.random(), np.random.rand(), float(torch.rand(())), self.own.random())
        return torch.tensor([index, *drawn], dtype=torch.float64)


def keep(batch: Any) -> Any:
    return batch


def read(epoch: int = 0, seed: int = 1, num_workers: int = 0) -> Tensor:
    """Read all samples in a random order; shape (10, 5), sorted by their indices."""
    dataset = Random()
    batches = BatchSampler(RandomSampler(dataset), 4, False)
    sampler = SharedBatchSampler(batches, "random", dataset=dataset, seed=seed)
    sampler.set_epoch(epoch)
    loader = rebuilt(
        DataLoader(dataset, num_workers=num_workers),
        dataset,
        batch_sampler=sampler,
        collate_fn=torch.stack,
    )
    rows = torch.cat(list(loader))
    return rows[rows[:, 0].argsort()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epoch_reaches_the_data_set_in_every_worker(num_workers: int) -> None:
    dataset = Indices()
    sampler = SharedBatchSampler(BatchSampler(range(20), 6, False), "in order")
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, collate_fn=keep)
    sampler.set_epoch(4)
    batches = list(loader)
    assert {epoch for _, epoch in batches} == {4}
    assert list(itertools.chain(*(indices for indices, _ in batches))) == list(range(20))


def test_draws_belong_to_seed_epoch_and_sample() -> None:
    """In whichever worker, and whatever was read before."""
    whole = read()
    assert torch.equal(read(num_workers=2), whole)
    for other in (read(epoch=1), read(seed=2)):
        assert (other[:, 1:] != whole[:, 1:]).all()


def test_reading_leaves_the_generators_as_they_were() -> None:
    """Without workers, dropout draws from the same ones."""
    dataset = Random()
    sampler = SharedBatchSampler(BatchSampler(range(10), 4, False), "in order", dataset=dataset)
    batches = iter(rebuilt(DataLoader(dataset), dataset, batch_sampler=sampler))
    before = generator_states()
    next(batches)
    assert same_states(generator_states(), before)


def test_a_sampler_that_shares_by_itself_is_replaced_only_where_it_is_torch_s_own() -> None:
    class Weighted(DistributedSampler[Any]):
        """Draws some samples more often."""

    def loader_of(kind: type[DistributedSampler[Any]], num_replicas: int) -> DataLoader[Any]:
        sampler = kind(Random(), num_replicas=num_replicas, rank=0, shuffle=True)
        return DataLoader(Random(), batch_size=4, sampler=sampler)

    batches, _ = _batches_of(loader_of(DistributedSampler, 2), "train_dataloader", True)
    assert type(batches.sampler) is RandomSampler
    batches, _ = _batches_of(loader_of(Weighted, 1), "train_dataloader", True)
    assert type(batches.sampler) is Weighted
    with pytest.raises(UserError, match="Weighted shares samples itself"):
        _batches_of(loader_of(Weighted, 2), "train_dataloader", True)
