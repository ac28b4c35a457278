import itertools

import pytest
from torch.utils.data import DataLoader, Dataset

from harness.data.batches import Batch, GlobalBatchSampler
from harness.errors import UserError


class Indices(Dataset[tuple[list[int], int]]):
    """Returns what it was asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, indices: list[int]) -> tuple[list[int], int]:
        assert isinstance(indices, Batch)
        return list(indices), indices.epoch


def keep(batch):
    return batch


def global_batches(num_ranks: int, num_micro: int, **kwargs: int) -> list[list[int]]:
    """Put the shares of all ranks and accumulated batches together, in order."""
    epoch = kwargs.pop("epoch", 0)
    shares = []
    for rank in range(num_ranks):
        sampler = GlobalBatchSampler(
            num_ranks=num_ranks, rank=rank, num_micro_batches=num_micro, seed=3, **kwargs
        )
        sampler.set_epoch(epoch)
        own = list(sampler)
        weights = [sampler.weight(k) for k in range(len(sampler))]
        shares.append([b if w else [] for b, w in zip(own, weights, strict=True)])
    flat = [list(itertools.chain(*parts)) for parts in zip(*shares, strict=True)]
    return [list(itertools.chain(*flat[k : k + num_micro])) for k in range(0, len(flat), num_micro)]


CASES = [(7, 8), (33, 10), (64, 64), (101, 16), (257, 64), (360, 37), (1257, 64)]


def test_global_batches_do_not_depend_on_the_number_of_processes() -> None:
    """Ranks split each global batch: nothing lost, nothing repeated."""
    cases = itertools.product(CASES, (0, 1, 5), range(1, 9), (1, 2, 4))
    for (num_samples, batch_size), epoch, num_ranks, num_micro in cases:
        size = max(batch_size, num_ranks * num_micro)
        arguments = {"num_samples": num_samples, "batch_size": size, "epoch": epoch}
        expected = global_batches(1, 1, **arguments)
        assert global_batches(num_ranks, num_micro, **arguments) == expected
        assert sorted(itertools.chain(*expected)) == list(range(num_samples))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epoch_reaches_the_data_set_in_every_worker(num_workers: int) -> None:
    sampler = GlobalBatchSampler(20, 6, shuffle=False)
    loader = DataLoader(
        Indices(20), batch_sampler=sampler, num_workers=num_workers, collate_fn=keep
    )
    sampler.set_epoch(4)
    batches = list(loader)
    assert {epoch for _, epoch in batches} == {4}
    assert list(itertools.chain(*(indices for indices, _ in batches))) == list(range(20))


def test_drop_last_leaves_out_only_the_smaller_batch() -> None:
    assert len(GlobalBatchSampler(45, 10)) == 5
    assert len(GlobalBatchSampler(45, 10, drop_last=True)) == 4
    with pytest.raises(UserError, match="drop_last leaves none"):
        GlobalBatchSampler(5, 10, drop_last=True)


def test_batch_smaller_than_its_parts_is_refused() -> None:
    with pytest.raises(UserError, match=r"Use data\.batch_size=4 or more"):
        GlobalBatchSampler(100, 3, num_ranks=4)
