"""Read a few samples of a run's first training batches, for the parity check.

In: the loaders of the run. Out: batches of a few samples, whole and split into parts. The loader's
own ``collate_fn`` makes these batches, which stay pickled in memory for later checks. If the loader
has workers, a separate worker reads the samples, so the training process opens no file of the data.
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

from harness.data.loaders import SharedLoader, flat_loaders
from harness.data.randomness import (
    generator_states,
    preserved_generators,
    same_states,
    seed_generators,
)
from harness.data.shared_batches import SharedBatchSampler
from harness.parity.snapshot import MOST_BYTES, NotCheckedError

MOST_SAMPLES = 31
FEWEST_SAMPLES = 3
Positions = tuple[int, ...]  # of samples in a batch


class FewSamples:
    """The first samples of a run's first batches. Reading them leaves the samplers as they are.

    Args:
        loaders: the trainer's loaders; their first batches must have been drawn.
        num_parts: the number of ranks, or of accumulated batches per step.
        is_larger: whether a sample needs more memory in the check than in training.

    Raises:
        NotCheckedError: a loader does not draw batches of indices, or a batch is too small.
    """

    def __init__(self, loaders: Any, num_parts: int, is_larger: bool) -> None:
        self.structure = loaders.iterables if isinstance(loaders, CombinedLoader) else loaders
        self.first = {id(loader): first_batches(loader) for loader in flat_loaders(loaders)}
        samplers = [loader.batch_sampler for loader in flat_loaders(loaders)]
        fewest = min(len(batch) for batches in self.first.values() for batch in batches)
        local_size = -(-fewest // max(sampler.num_local_batches for sampler in samplers))
        self.size = min(fewest, MOST_SAMPLES, most_samples(local_size, is_larger))
        if self.size < FEWEST_SAMPLES:
            raise NotCheckedError(f"a batch has fewer than {FEWEST_SAMPLES} samples")
        # If all local batches have one size, user code may average the means of the ranks.
        self.are_even = all(map(is_even, samplers))
        self.num_parts = num_parts
        self.pickled: dict[Any, bytes] = {}

    def sizes(self, must_be_even: bool) -> list[int]:
        """Return the number of samples of each part.

        A part of size 0 computes a sample of another part, with weight 0.
        """
        size, num_parts = self.size, self.num_parts
        if (must_be_even or self.are_even) and size >= num_parts:
            return [2 ** ((size // num_parts).bit_length() - 1)] * num_parts
        if must_be_even:
            raise NotCheckedError(f"{size} samples are too few for {num_parts} equal parts")
        if size <= num_parts or num_parts == 2:  # two parts with samples, the others are empty
            return [size - size // 3, size // 3, *[0] * (num_parts - 2)]
        size_of_others = size // (num_parts + 1)
        first_size = size - size_of_others * (num_parts - 1)
        return [first_size, *[size_of_others] * (num_parts - 1)]

    def positions(self, sizes: Sequence[int], number: int) -> tuple[Positions, list[Positions]]:
        """Return the positions in a batch of all samples that a check uses, and those of each part.

        Args:
            sizes: the number of samples of each part.
            number: the check's number, from 0. Each check starts 5 samples after the previous one.
        """
        batch_size = min(len(batches[0]) for batches in self.first.values())
        whole = tuple((5 * number + i) % batch_size for i in range(sum(sizes)))
        ends = [*accumulate(sizes)]
        parts = [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return whole, [part or whole[:1] for part in parts]

    def read(self, number: int, wanted: Sequence[Positions]) -> list["Collated"]:
        """Return, for each element of ``wanted``, a batch of the samples at these positions.

        Args:
            number: chooses one of the first batches.
            wanted: positions in that batch.
        """
        missing = [positions for positions in wanted if (number, positions) not in self.pickled]
        columns = []
        for loader in flat_loaders(self.structure) if missing else ():
            batches = self.first[id(loader)]
            indices = batches[number % len(batches)]
            chosen = [[indices[i] for i in positions] for positions in missing]
            columns.append(read_once(loader, chosen))
        for i, positions in enumerate(missing):
            parts = iter([column[i] for column in columns])
            batch = apply_to_collection(self.structure, DataLoader, lambda _, it=parts: next(it))
            self.pickled[number, positions] = pickle.dumps(batch)
        batches_read = [self.pickled[number, positions] for positions in wanted]
        if sum(map(len, self.pickled.values())) > MOST_BYTES:
            self.pickled = {}
        return [join_batches(pickle.loads(batch)) for batch in batches_read]


def read_once(loader: Any, batches: Sequence[Sequence[Any]]) -> list["Collated"]:
    """Read batches of a data set as its loader does; in a worker if the loader has workers."""
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
    """Batches that seed the generators of this process when they are read."""

    def __iter__(self) -> Any:
        return (batch.begin() for batch in super().__iter__())


class Collated:
    """A batch, and whether collating it has drawn random numbers."""

    def __init__(self, batch: Any, has_drawn: bool) -> None:
        self.batch, self.has_drawn = batch, has_drawn


def collated(collate: Callable[[Any], Any], samples: Any) -> Collated:
    """Collate samples, with the same seed for all parts."""
    seed_generators(0)
    before = generator_states()
    batch = collate(samples)
    return Collated(batch, not same_states(before, generator_states()))


def join_batches(batches: Any) -> Collated:
    """Merge the loaders' batches into one batch, which is nested like the loaders."""
    have_drawn: list[bool] = []

    def batch_of(item: Collated) -> Any:
        have_drawn.append(item.has_drawn)
        return item.batch

    return Collated(apply_to_collection(batches, Collated, batch_of), any(have_drawn))


def most_samples(local_size: int, is_larger: bool) -> int:
    """Return how many samples a check may compute without more memory than a training step.

    Args:
        local_size: the number of samples of a local batch in training.
        is_larger: whether a sample needs more memory in the check than in training.
    """
    if is_larger:
        return max(FEWEST_SAMPLES, local_size // 2)
    return max(FEWEST_SAMPLES, local_size - 1 if local_size > 7 else local_size)


def is_even(sampler: SharedBatchSampler) -> bool:
    """Return whether all local batches of a training have the same size."""
    size = getattr(sampler.batches, "batch_size", None)
    num_local_batches = max(2, sampler.num_local_batches)
    if not size or size % num_local_batches:
        return False
    rest = sampler.settings()["num_samples"] % size
    return bool(getattr(sampler.batches, "drop_last", False)) or rest % num_local_batches == 0


def first_batches(loader: Any) -> list[list[Any]]:
    """Return the batches with the most samples among a loader's first batches."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, SharedBatchSampler):
        raise NotCheckedError("its batches come from a stream")
    subclasses = type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]
    if any("__iter__" in vars(kind) for kind in subclasses if kind is not SharedLoader):
        raise NotCheckedError("its loader's __iter__ makes the batches")
    most = max(map(len, sampler.first), default=0)
    if not most:
        raise NotCheckedError("no batch was drawn")
    return [batch for batch in sampler.first if len(batch) == most]


def transferred(module: pl.LightningModule, batch: Any) -> Any:
    """Move a batch to the module's device, with the transfer hooks of data module or module."""
    from pytorch_lightning.utilities.model_helpers import is_overridden

    trainer = module.trainer
    batch = trainer.precision_plugin.convert_input(batch)
    data = getattr(trainer, "datamodule", None)
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        hooked = data if data is not None and is_overridden(name, data) else module
        device = (module.device,) if name == "transfer_batch_to_device" else ()
        batch = getattr(hooked, name)(batch, *device, 0)
    return batch
