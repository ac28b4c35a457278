"""A few samples of the batches with which training begins.

In: the loaders of a trainer that trains. Out: batches of these samples, collated whole or in
parts, for each step of the first-batch check. Samplers are not moved by it.
"""

from collections.abc import Sequence
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader

from harness.data.batches import Batch
from harness.data.loaders import SharedLoader, leaves
from harness.data.randomness import generator_states, same_states, seed_generators
from harness.data.shared_batches import SharedBatchSampler
from harness.upstream.dispatch import FixedDraws

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)  # no two parts hide the same fraction


class UncheckedError(Exception):
    """A module cannot be checked: its data are a stream, or batches have one sample."""


class FirstSamples:
    """Samples of the first batches that samplers have drawn."""

    def __init__(self, loaders: Any) -> None:
        self.structure = loaders.iterables if isinstance(loaders, CombinedLoader) else loaders
        self.drawn = {id(one): _largest_batches(one) for one in leaves(loaders)}
        fewest = min((len(b) for batches in self.drawn.values() for b in batches), default=0)
        self.size = max((n for n in PRIMES if n <= fewest), default=0)
        if not self.size:
            raise UncheckedError("batches have one sample")
        # With even shares only, an author's own all-reduce of means is right.
        self.are_even = all(_is_even(one.batch_sampler) for one in leaves(loaders))
        self.num_steps = max(3, *map(len, self.drawn.values()))
        self.samples: dict[Any, Any] = {}  # that have been read
        self.has_drawn = False  # random numbers for a whole batch
        self.has_unfixed = False  # and they are other ones in parts

    def batches(self, step: int, sizes: Sequence[int], in_reverse: bool = False) -> list[Any]:
        """Collate the samples of a step in parts of these sizes."""
        places, parts = [*range(sum(sizes))][:: -1 if in_reverse else 1], []
        for size in sizes:
            part, places = places[:size], places[size:]
            parts.append(apply_to_collection(self.structure, DataLoader, self._batch, step, part))
        return parts

    def _batch(self, loader: DataLoader[Any], step: int, places: Sequence[int]) -> Any:
        drawn = self.drawn[id(loader)]
        indices = drawn[step % len(drawn)]
        first = step // len(drawn) * 5  # a batch that comes again begins with another sample
        wanted = [indices[(first + place) % self.size] for place in places]
        samples = self._read(loader, wanted)
        seed_generators(step)
        before = generator_states()
        with FixedDraws() as draws:
            batch = loader.collate_fn(samples)
        after = generator_states()
        self.has_drawn |= not same_states(before, after)
        self.has_unfixed |= draws.has_missed or not same_states((*before[:2], after[2]), after)
        return batch

    def _read(self, loader: DataLoader[Any], wanted: list[Any]) -> Any:
        """Read samples as the run does: each once, with generators that are seeded for it."""
        dataset, sampler = loader.dataset, loader.batch_sampler
        if hasattr(dataset, "__getitems__"):
            return dataset.__getitems__(_seeded(sampler, wanted))
        new = [index for index in wanted if (id(loader), index) not in self.samples]
        for index in _seeded(sampler, new):
            self.samples[id(loader), index] = dataset[index]
        return [self.samples[id(loader), index] for index in wanted]


def _is_even(sampler: Any) -> bool:
    """Return whether processes always have shares of one size."""
    size, num_shares = getattr(sampler.batches, "batch_size", None), sampler.num_ranks
    num_shares = max(2, num_shares * sampler.num_micro_batches)
    return bool(size and size % num_shares == 0 and getattr(sampler.batches, "drop_last", False))


def _seeded(sampler: Any, indices: list[Any]) -> Batch:
    if sampler.generators is None or not indices:
        return Batch(indices, sampler.running)
    return Batch(indices, sampler.running, sampler.seed, sampler.generators).begin()


def _largest_batches(loader: Any) -> list[Any]:
    """Return the largest of a loader's first batches."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, SharedBatchSampler):
        raise UncheckedError("its batches come from a stream")
    own = type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]
    if any("__iter__" in vars(kind) for kind in own if kind is not SharedLoader):
        raise UncheckedError("its loader's __iter__ makes the batches")
    first = sampler.first
    while len(first) > 3 and sum(map(len, first[:-1])) > 61:  # enough samples for three steps
        first = first[:-1]
    most = max(map(len, first), default=0)
    return [batch for batch in first if len(batch) == most]
