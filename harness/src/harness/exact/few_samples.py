"""Read a few samples of the batches with which training begins.

In: the loaders of a run. Out: batches of few samples, whole and in parts, collated by the loader's
own function. A loader with workers has them read by a worker of their own, so that the training
process opens no file of the data set. They are kept as bytes, for later checks.
"""

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import pytorch_lightning as pl
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader

from harness.data.loaders import SharedLoader, leaves
from harness.data.randomness import (
    generator_states,
    preserved_generators,
    same_states,
    seed_generators,
)
from harness.data.shared_batches import SharedBatchSampler
from harness.exact.snapshot import MOST_BYTES, NotCheckedError

MOST_SAMPLES = 31
FEWEST_SAMPLES = 3
Places = tuple[int, ...]  # of samples in a batch


class FewSamples:
    """The first samples of the first batches of a run's loaders; samplers are not moved by it.

    Args:
        loaders: the trainer's, of which batches have been drawn.
        num_parts: ranks, or batches that a step accumulates.
        is_larger: the check takes more memory for each sample than training does.

    Raises:
        NotCheckedError: there are no batches of samples, or too few samples in them.
    """

    def __init__(self, loaders: Any, num_parts: int, is_larger: bool) -> None:
        self.structure = loaders.iterables if isinstance(loaders, CombinedLoader) else loaders
        self.first = {id(one): first_batches(one) for one in leaves(loaders)}
        samplers = [one.batch_sampler for one in leaves(loaders)]
        fewest = min(len(batch) for batches in self.first.values() for batch in batches)
        num_shares = max(sampler.num_shares for sampler in samplers)
        self.size = min(fewest, MOST_SAMPLES, most_samples(-(-fewest // num_shares), is_larger))
        if self.size < FEWEST_SAMPLES:
            raise NotCheckedError(f"a batch has fewer than {FEWEST_SAMPLES} samples")
        # With batches that are always shared evenly an all-reduce of means by hand is right.
        self.are_even = all(map(is_even, samplers))
        self.num_parts = num_parts
        self.kept: dict[Any, bytes] = {}

    def sizes(self, must_be_even: bool) -> list[int]:
        """Return the number of samples of each part; a part of 0 repeats a sample, and counts 0."""
        size, num = self.size, self.num_parts
        if (must_be_even or self.are_even) and size >= num:
            return [2 ** ((size // num).bit_length() - 1)] * num
        if must_be_even:
            raise NotCheckedError(f"{size} samples are too few for {num} ranks that gather")
        if size <= num or num == 2:  # two parts, whatever the number of ranks
            return [size - size // 3, size // 3, *[0] * (num - 2)]
        each = size // (num + 1)
        return [size - each * (num - 1), *[each] * (num - 1)]

    def places(self, sizes: Sequence[int], number: int) -> tuple[Places, list[Places]]:
        """Return the places of all samples of a check in a batch, and of those of each part."""
        most = min(len(batches[0]) for batches in self.first.values())
        whole = tuple((5 * number + i) % most for i in range(sum(sizes)))
        ends = [*accumulate(sizes)]
        parts = [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return whole, [part or whole[:1] for part in parts]

    def read(self, number: int, wanted: Sequence[Places]) -> list["Collated"]:
        """Return batches of the samples at these places of one of the first batches."""
        missing = [places for places in wanted if (number, places) not in self.kept]
        columns = []
        for loader in leaves(self.structure) if missing else ():
            batches = self.first[id(loader)]
            indices = batches[number % len(batches)]
            chosen = [[indices[place] for place in places] for places in missing]
            columns.append(read_once(loader, chosen))
        for i, places in enumerate(missing):
            parts = iter([column[i] for column in columns])
            batch = apply_to_collection(self.structure, DataLoader, lambda _, it=parts: next(it))
            self.kept[number, places] = pickle.dumps(batch)
        found = [self.kept[number, places] for places in wanted]
        if sum(map(len, self.kept.values())) > MOST_BYTES:
            self.kept = {}
        return [joined(pickle.loads(one)) for one in found]


def read_once(loader: Any, batches: Sequence[Sequence[Any]]) -> list["Collated"]:
    """Read batches of a data set as its loader does, in another process if the loader has any."""
    has_workers = loader.num_workers > 0
    drawn = [loader.batch_sampler.batch([*indices]) for indices in batches]
    reading: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_sampler=drawn if has_workers else _Begun(drawn),
        num_workers=int(has_workers),
        collate_fn=partial(collated, loader.collate_fn),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
    )
    with preserved_generators():
        return list(reading)


class _Begun(list[Any]):
    """Batches that seed the generators of this process as they are read."""

    def __iter__(self) -> Any:
        return (batch.begin() for batch in super().__iter__())


class Collated:
    """A batch, and whether collating it has drawn."""

    def __init__(self, batch: Any, has_drawn: bool) -> None:
        self.batch, self.has_drawn = batch, has_drawn


def collated(collate: Callable[[Any], Any], samples: Any) -> Collated:
    """Collate samples, with generators that are seeded alike for all parts."""
    seed_generators(0)
    before = generator_states()
    batch = collate(samples)
    return Collated(batch, not same_states(before, generator_states()))


def joined(batches: Any) -> Collated:
    """Return the batches of all loaders as one."""
    drawn: list[bool] = []

    def batch_of(one: Collated) -> Any:
        drawn.append(one.has_drawn)
        return one.batch

    return Collated(apply_to_collection(batches, Collated, batch_of), any(drawn))


def most_samples(num_here: int, is_larger: bool) -> int:
    """Return the most samples that take no more memory than a step with `num_here` of them."""
    if is_larger:
        return max(FEWEST_SAMPLES, num_here // 2)
    return max(FEWEST_SAMPLES, num_here - 1 if num_here > 7 else num_here)


def is_even(sampler: SharedBatchSampler) -> bool:
    """Return whether all parts of all batches of a training have one size."""
    size, num_shares = getattr(sampler.batches, "batch_size", None), max(2, sampler.num_shares)
    if not size or size % num_shares:
        return False
    rest = sampler.settings()["num_samples"] % size
    return bool(getattr(sampler.batches, "drop_last", False)) or rest % num_shares == 0


def first_batches(loader: Any) -> list[list[Any]]:
    """Return the largest of a loader's first batches."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, SharedBatchSampler):
        raise NotCheckedError("its batches come from a stream")
    own = type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]
    if any("__iter__" in vars(kind) for kind in own if kind is not SharedLoader):
        raise NotCheckedError("its loader's __iter__ makes the batches")
    most = max(map(len, sampler.first), default=0)
    if not most:
        raise NotCheckedError("no batch was drawn")
    return [batch for batch in sampler.first if len(batch) == most]


def transferred(module: pl.LightningModule, batch: Any) -> Any:
    """Move a batch to the module's device, by the hooks of the data module or of the module."""
    from pytorch_lightning.utilities.model_helpers import is_overridden

    trainer = module.trainer
    batch = trainer.precision_plugin.convert_input(batch)
    data = getattr(trainer, "datamodule", None)
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        owner = data if data is not None and is_overridden(name, data) else module
        device = (module.device,) if name == "transfer_batch_to_device" else ()
        batch = getattr(owner, name)(batch, *device, 0)
    return batch
