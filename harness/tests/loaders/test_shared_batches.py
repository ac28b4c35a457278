"""Ranks split every batch of any sampler: no sample is lost, repeated or drawn otherwise."""

from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product, zip_longest
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from harness.data.shared_batches import SharedBatchSampler
from harness.data.wrap_loaders import draws_nothing, wrap_loaders
from harness.errors import UserError
from harness.parity import global_batches
from tests.loaders.zoo import (
    NUM_SAMPLES,
    ByLength,
    ByNumberOfTokens,
    Followed,
    MovedAtRandom,
    Numbers,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")
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
                    if not sampler.is_padding(k):
                        indices += batches[k]
                    weights += sampler.weight(k)
            assert indices == batch
            assert weights == pytest.approx(num_ranks * num_micro_batches)
            assert shared[0].num_before(step * num_micro_batches) == sum(map(len, expected[:step]))
    assert read(alone, 0) != read(alone, 1)


def test_a_shorter_loader_goes_on_in_its_round() -> None:
    """Lightning begins it again beside a longer one, also after a resume in a later round."""
    (whole,) = ranks("by tokens", 1)
    whole.set_epoch(1)
    rounds = [[list(batch) for batch in whole] for _ in range(3)]
    assert rounds[0] != rounds[1]
    num = len(rounds[0])
    for step in (0, 1, num - 1, num, num + 2):
        (resumed,) = ranks("by tokens", 1)
        resumed.start_at(1, step)
        found = [list(batch) for batch in resumed]
        while len(found) < 3 * num - step:
            found += [list(batch) for batch in resumed]
        assert found == [batch for one in rounds for batch in one][step:]


def evaluations(num_ranks: int, batch_size: int = 8, **how: Any) -> list[SharedBatchSampler]:
    batches = BatchSampler(SequentialSampler(range(NUM_SAMPLES)), batch_size, False)
    return [
        SharedBatchSampler(batches, "x", num_ranks=num_ranks, rank=r, is_round_robin=True, **how)
        for r in range(num_ranks)
    ]


def in_order(found: list[list[Any]]) -> list[Any]:
    """The elements of all processes in the order of turns."""
    return [one for turn in zip_longest(*found) for one in turn if one is not None]


def test_an_evaluation_gives_whole_batches_in_turn() -> None:
    """Each sample once; one process may have a batch more than another."""
    expected = [list(range(i, min(i + 8, NUM_SAMPLES))) for i in range(0, NUM_SAMPLES, 8)]
    for num_ranks, limit, epoch in product((1, 2, 3), (None, 3), (0, 3)):
        samplers = evaluations(num_ranks, limit=limit)
        found = [read(sampler, epoch) for sampler in samplers]
        assert [len(batches) for batches in found] == [len(sampler) for sampler in samplers]
        assert in_order(found) == expected[:limit]
        sizes = [[s.num_samples_in(k) for k in range(len(s))] for s in samplers]
        assert sizes == [[len(batch) for batch in batches] for batches in found]
        assert not any(s.is_padding(k) for s in samplers for k in range(len(s)))


def test_batches_that_are_fewer_than_processes_are_split_by_samples(caplog) -> None:
    """And those of the last turn where all processes must have as many, as under fsdp."""
    for num_ranks, how in ((6, {}), (2, {"splits_last": True}), (3, {"splits_last": True})):
        samplers = evaluations(num_ranks, **how)
        found = [read(sampler, 0) for sampler in samplers]
        assert len({len(batches) for batches in found}) == 1
        assert [len(batches) for batches in found] == [len(sampler) for sampler in samplers]
        assert sorted(i for batches in found for b in batches for i in b) == [*range(NUM_SAMPLES)]
        assert "split by samples" in caplog.text
        caplog.clear()
    # The last batch has one sample: it goes into the turn before.
    found = [read(sampler, 0) for sampler in evaluations(2, 18, splits_last=True)]
    assert [[len(batch) for batch in batches] for batches in found] == [[19], [18]]
    with pytest.raises(UserError, match="37 samples are too few for 40 processes"):
        read(evaluations(40)[0], 0)


class Stream(IterableDataset[int]):
    """Numbers from 0."""

    def __iter__(self) -> Any:
        yield from range(12)


class ByItself(DataLoader[Any]):
    """Reads its data set without the sampler."""

    def __iter__(self) -> Any:
        yield from self.dataset


def trainer_of(num_ranks: int, rank: int) -> Any:
    how = {"num_replicas": num_ranks, "rank": rank}
    strategy = SimpleNamespace(distributed_sampler_kwargs=how)
    shared = {"accumulate_grad_batches": 1, "overfit_batches": 0.0, "lightning_module": None}
    return SimpleNamespace(strategy=strategy, **shared)


def shared(loader: Any, num_ranks: int = 2, rank: int = 0) -> Any:
    return wrap_loaders(loader, trainer_of(num_ranks, rank), "train", "mine", seed=0)


def test_a_subclass_of_dataloader_is_a_loader_like_any_other() -> None:
    data, found = Numbers(), []
    for num_ranks in (1, 2):
        loaders = [shared(Followed(8, data, [1.0] * 37), num_ranks, r) for r in range(num_ranks)]
        assert all(isinstance(one, Followed) and one.follow == "inputs" for one in loaders)
        assert all(isinstance(one.sampler, WeightedRandomSampler) for one in loaders)
        batches = zip(*loaders, strict=True)
        found.append([torch.cat([one["inputs"] for one in turn]) for turn in batches])
    for alone, together in zip(*found, strict=True):
        assert torch.equal(alone, together)


def test_a_sampler_that_shares_by_itself_is_replaced_only_where_it_is_torch_s_own() -> None:
    class Weighted(DistributedSampler[Any]):
        """Draws some samples more often."""

    def sampler_of(kind: type[DistributedSampler[Any]], num_replicas: int) -> Any:
        sampler = kind(data := range(10), num_replicas=num_replicas, rank=0, shuffle=True)
        return shared(DataLoader(data, 4, sampler=sampler)).batch_sampler.batches.sampler

    assert list(sampler_of(DistributedSampler, 2)) == list(sampler_of(DistributedSampler, 1))
    assert type(sampler_of(Weighted, 1)) is Weighted
    with pytest.raises(UserError, match="Weighted splits the samples between"):
        sampler_of(Weighted, 2)


def test_a_loader_that_does_not_read_its_batch_sampler_is_refused() -> None:
    with pytest.raises(UserError, match="ByItself does not read its batch_sampler"):
        next(iter(shared(ByItself([1, 2, 3], 2))))


def test_batches_without_an_order_are_refused() -> None:
    """A rank would combine its part of one batch with another rank's part of another batch."""
    for data in ([*range(12)], Stream()):
        how = {"num_workers": 2, "in_order": False}
        with pytest.raises(UserError, match="Leave out in_order=False"):
            shared(DataLoader(data, 4, **how), 1)
        shared(DataLoader(data, 4, **how | {"num_workers": 1}), 1)  # one worker keeps the order


def test_what_is_drawn_while_a_batch_moves_depends_on_its_place_alone() -> None:
    """So a resumed run draws it again."""

    def draws(module: Any, rank: int, step: int, num_workers: int = 0) -> list[float]:
        trainer = trainer_of(2, rank)
        trainer.lightning_module = module
        loader = DataLoader([*range(12)], 4, num_workers=num_workers)
        loader = wrap_loaders(loader, trainer, "train", "mine", seed=0)
        loader.batch_sampler.start_at(1, step)
        return [float(torch.rand(())) for _ in loader]

    whole = draws(MovedAtRandom(), 0, 0)
    assert len(set(whole)) == 3
    assert draws(MovedAtRandom(), 0, 1, num_workers=1) == whole[1:]
    assert not set(draws(MovedAtRandom(), 1, 0)) & set(whole)


@pytest.mark.parametrize(("seed_difference", "num_drawn"), [(0, 5), (0, 3), (1, 5), (1, 3)])
def test_ranks_with_other_batches_are_refused_even_if_one_has_drawn_ahead(
    seed_difference: int, num_drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplers = ranks("stock", 2)
    samplers[1].seed += seed_difference
    for sampler, num in zip(samplers, (5, num_drawn), strict=True):
        next(islice(sampler, num - 1, None))
    barrier, slots = Barrier(2), dict[int, Any]()

    def gather(rank: int, value: Any) -> list[Any]:
        slots[rank] = value
        barrier.wait(5)
        found = [slots[0], slots[1]]
        barrier.wait(5)
        return found

    def check(rank: int) -> str:
        try:
            global_batches.check_same_batches(rank, [samplers[rank]])  # type: ignore[arg-type]
        except UserError as error:
            return str(error)
        return ""

    monkeypatch.setattr(global_batches, "gather", gather)
    with ThreadPoolExecutor(2) as pool:
        for message in pool.map(check, range(2)):
            assert ("draws different batches" in message) == (seed_difference != 0)


def test_only_tensors_of_torchs_own_data_set_need_no_seeds() -> None:
    class Drawing(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(1)

    tensors = TensorDataset(torch.arange(4))
    assert draws_nothing(DataLoader(tensors))
    assert draws_nothing(DataLoader(Subset(Subset(tensors, [0, 1, 2]), [1, 2])))
    assert not draws_nothing(DataLoader(tensors, collate_fn=lambda samples: torch.rand(1)))
    assert not draws_nothing(type("Own", (DataLoader,), {})(tensors))  # its __iter__ may draw
    assert not draws_nothing(DataLoader(Drawing(torch.arange(4))))
    assert not draws_nothing(DataLoader(Subset(Drawing(torch.arange(4)), [0])))
