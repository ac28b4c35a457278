"""Which samples each process sees, in which order: the only place that decides what a batch is."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from harness.data.batch_size import check_batch_size
from harness.data.randomness import mix
from harness.errors import UserError


class Batch(list[int]):
    """Indices of one batch, with the epoch they belong to.

    It reaches ``Dataset.__getitems__`` as it is, in whichever worker, so that an augmentation
    can depend on (seed, epoch, sample) and on nothing else.
    """

    def __init__(self, indices: list[int], epoch: int = 0) -> None:
        super().__init__(indices)
        self.epoch = epoch

    def __reduce__(self) -> tuple[type["Batch"], tuple[list[int], int]]:
        return Batch, (list(self), self.epoch)


def bounds(size: int, index: int, num_shares: int) -> tuple[int, int]:
    """First and one-past-last position of share ``index`` of ``num_shares`` balanced shares.

    The sizes of the shares differ by one at most.
    """
    return -(-size * index // num_shares), -(-size * (index + 1) // num_shares)


class Shares(ABC):
    """What is known of the batches of a loader, of which this process reads its share."""

    @abstractmethod
    def is_filler(self, batch_idx: int) -> bool:
        """Whether this process's share is empty, and it reads another's sample in its place."""

    def weight(self, batch_idx: int) -> float:
        """Factor that turns this batch's mean gradient into its term of the global mean.

        Processes and accumulated batches are averaged with equal weights by the framework;
        shares of unequal size must not be. It is 1 wherever the shares are equal.
        """
        return 1.0

    def num_samples_in(self, batch_idx: int) -> int | None:
        """Samples in this process's batch, a filler's as well; ``None`` where nobody counts."""
        return None

    def has_ended(self, batch_idx: int) -> bool:
        """Whether this loader gives nothing any more, while a longer one goes on beside it."""
        return False

    def settings(self) -> dict[str, Any]:
        """What the global batches depend on: a run that goes on must have the same."""
        return {}

    def start_at(self, epoch: int, step: int) -> None:
        """Let ``epoch`` begin at a step; the length stays, as Lightning counts on from there."""
        # Lightning asks for the first batches before it announces the epoch.
        self.start, self.epoch = (epoch, step), epoch


class SplitBatches(Shares):
    """Global batches that are split into ``num_ranks * num_micro_batches`` balanced shares."""

    num_ranks: int
    rank: int
    num_micro_batches: int

    @abstractmethod
    def _extent(self, step: int) -> tuple[int, int]:
        """Samples of the epoch before a global batch, and in it; 0 behind the last one."""

    def _share(self, batch_idx: int) -> tuple[int, int, int]:
        """This process's (first, one-past-last) position in the epoch, and the global size."""
        step, micro = divmod(batch_idx, self.num_micro_batches)
        start, size = self._extent(step)
        index = micro * self.num_ranks + self.rank
        low, high = bounds(size, index, self.num_micro_batches * self.num_ranks)
        return start + low, start + high, size

    def num_before(self, batch_idx: int) -> int:
        """Samples of all processes in the batches of an epoch before this one."""
        step, micro = divmod(batch_idx, self.num_micro_batches)
        start, size = self._extent(step)
        return start + bounds(size, micro, self.num_micro_batches)[0]

    def weight(self, batch_idx: int) -> float:
        """See ``Shares``."""
        if self.num_ranks * self.num_micro_batches == 1:
            return 1.0
        low, high, size = self._share(batch_idx)
        return (high - low) * self.num_ranks * self.num_micro_batches / size

    def is_filler(self, batch_idx: int) -> bool:
        """See ``Shares``."""
        low, high, _ = self._share(batch_idx)
        return low == high

    def num_samples_in(self, batch_idx: int) -> int | None:
        """See ``Shares``."""
        low, high, _ = self._share(batch_idx)
        return max(1, high - low)


class BatchedDataset(Dataset[Any], ABC):
    """A data set that reads whole batches, which is faster than sample by sample.

    What it draws at random must depend on (seed, ``indices.epoch``, index): see
    ``randomness.uniform``. Other data sets are read sample by sample, with seeded generators.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Samples in the data set."""

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> Any:
        """Read the samples of a ``Batch`` of indices, collated."""


class GlobalBatchSampler(Sampler[Batch], SplitBatches):
    """Yield this process's share of each global batch of one epoch after another.

    The order depends only on (seed, epoch), never on the number of processes, so a run stopped
    on 4 devices can continue on 2 and see the same global batches. A global batch is split into
    ``num_ranks * num_micro_batches`` balanced shares; no sample is repeated or lost. Where
    the last batch has fewer samples than shares, an empty share yields one sample whose
    ``weight`` is 0, because every process must compute every step.

    Args:
        num_samples: samples in the data set.
        batch_size: samples per optimizer step, summed over processes.
        num_ranks: processes that share each global batch.
        rank: which of them this one is.
        num_micro_batches: batches that a process accumulates per optimizer step.
        seed: with the epoch, decides the order.
        shuffle: ``False`` keeps the data set's order.
        drop_last: leave out a last batch that is smaller than ``batch_size``.

    Raises:
        UserError: if the batch has fewer samples than shares, or no batch is left.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        num_ranks: int = 1,
        rank: int = 0,
        num_micro_batches: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.num_samples, self.batch_size = num_samples, batch_size
        self.num_ranks, self.rank, self.num_micro_batches = num_ranks, rank, num_micro_batches
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch = 0
        self.start = (0, 0)
        # Lightning announces the epoch to `loader.batch_sampler.sampler`.
        self.sampler = self
        check_batch_size(batch_size, num_ranks, num_micro_batches)
        if self.num_steps == 0:
            raise UserError(
                f"data.batch_size={batch_size} with drop_last leaves none of the {num_samples} "
                "training samples.\nUse a smaller data.batch_size or data.drop_last=false."
            )

    @property
    def num_steps(self) -> int:
        """Optimizer steps per epoch."""
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __len__(self) -> int:
        return self.num_steps * self.num_micro_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next ``iter``."""
        self.epoch = epoch

    def settings(self) -> dict[str, Any]:
        """See ``Shares``."""
        names = ("num_samples", "batch_size", "drop_last", "seed")
        return {name: getattr(self, name) for name in names}

    def order(self, epoch: int) -> torch.Tensor:
        """The data set's indices in the order of ``epoch``, shape (num_samples,)."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def _extent(self, step: int) -> tuple[int, int]:
        start = min(step * self.batch_size, self.num_samples)
        return start, min(self.batch_size, self.num_samples - start)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.epoch
        order = self.order(epoch)
        first_epoch, first_step = self.start
        first = first_step * self.num_micro_batches if epoch == first_epoch else 0
        for batch_idx in range(first, len(self)):
            low, high, _ = self._share(batch_idx)
            share = order[low:high] if high > low else order[:1]
            yield Batch(share.tolist(), epoch)
