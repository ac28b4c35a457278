"""The batches of anybody's sampler, shared between processes."""

import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytorch_lightning as pl
from torch.utils.data import Sampler

from harness.data.batches import Batch, SplitBatches
from harness.data.loading import processes
from harness.data.randomness import mix, reseed, seeded_iteration

log = logging.getLogger(__name__)
LIMITS = {"val": "limit_val_batches", "test": "limit_test_batches"}
LIMITS |= {"predict": "limit_predict_batches"}


class SharedBatchSampler(Sampler[Batch], SplitBatches):
    """Share the batches of any batch sampler: weighted, by length, or an owner's own.

    The batch sampler alone decides what a global batch is. Every process draws the same ones from
    it, with generators that are seeded by (seed, epoch), and takes its part: in training a
    balanced share of each batch, as ``GlobalBatchSampler`` gives it; in an evaluation whole
    batches in turn, so that what looks at a whole batch sees what one process would.

    Args:
        batches: gives lists of indices, or of whatever the data set is read by.
        name: what a message calls it.
        num_ranks: processes that share the batches.
        rank: which of them this one is.
        num_micro_batches: batches that a process accumulates per optimizer step.
        seed: with the epoch, decides what the batch sampler draws.
        in_turn: give whole batches in turn, in the order of every epoch.
        limit: the most batches of an evaluation, over all processes.
        is_fixed: draw the same batches in every epoch, as an overfitting run needs.
        cycles: begin again within an epoch, beside a longer loader.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[Any]],
        name: str,
        *,
        num_ranks: int = 1,
        rank: int = 0,
        num_micro_batches: int = 1,
        seed: int = 0,
        in_turn: bool = False,
        limit: int | None = None,
        is_fixed: bool = False,
        cycles: bool = True,
    ) -> None:
        self.batches: Any = batches
        self.name, self.limit = name, limit
        self.num_ranks, self.rank, self.num_micro_batches = num_ranks, rank, num_micro_batches
        self.seed, self.in_turn, self.is_fixed = seed, in_turn, is_fixed or in_turn
        self.cycles = cycles
        self.epoch = 0
        self.start = (0, 0)
        self.expected: dict[int, int] = {}  # checksums of the run that goes on, by step
        self.sampler = self  # Lightning announces the epoch to `loader.batch_sampler.sampler`
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.running, self.num_rounds, self.num_in_rounds = epoch, 0, 0
        self.totals = [0]  # samples in the batches before each one of this epoch
        self.sums = [0]  # a checksum of the indices in the batches before each one
        self.num_full_turns = 0  # of an evaluation, in which this process has a batch of its own

    def _drawn(self, num_round: int) -> Iterator[list[Any]]:
        """Draw the batches of a round, and count them."""
        seed = mix(self.seed, 0 if self.is_fixed else self.running, num_round)
        for sampler in samplers_in(self.batches):
            for value in list(getattr(sampler, "__dict__", {}).values()):
                reseed(value, seed)
        # torch's own samplers draw all they need for an epoch at its start.
        are_stock = {type(s).__module__ for s in samplers_in(self.batches)}
        drawn = seeded_iteration(self.batches, seed, are_stock == {"torch.utils.data.sampler"})
        for indices in islice(drawn, self.limit):
            batch, step = list(indices), len(self.totals) - 1
            self.totals.append(self.totals[-1] + len(batch))
            self.sums.append(zlib.crc32(repr(batch).encode(), self.sums[-1]))
            if self.expected.pop(step, self.sums[-1]) != self.sums[-1]:
                self._tell_of_other_batches()
            yield batch

    def _tell_of_other_batches(self) -> None:
        log.warning(
            "%s draws other batches than before the run was stopped: samples of this epoch may be "
            "seen twice or not at all. Let it draw from torch's generator, and keep no place of "
            "its own.",
            self.name,
        )

    def __len__(self) -> int:
        num_batches = len(self.batches)  # TypeError: not every sampler has one
        if self.in_turn:
            return -(-min(num_batches, self.limit or num_batches) // self.num_ranks)
        return num_batches * self.num_micro_batches

    def settings(self) -> dict[str, Any]:
        """See ``Shares``."""
        batch_size = getattr(self.batches, "batch_size", None)
        sampler = getattr(self.batches, "sampler", self.batches)
        try:
            size: int | None = len(sampler)
        except TypeError:
            size = None
        return {"sampler": self.name, "size": size, "batch_size": batch_size, "seed": self.seed}

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next ``iter``, also of a sampler that has epochs of its own."""
        self.epoch = epoch
        for sampler in samplers_in(self.batches):
            if callable(announce := getattr(sampler, "set_epoch", None)):
                announce(epoch)

    def start_at(self, epoch: int, step: int) -> None:
        """See ``Shares``."""
        super().start_at(epoch, step)
        self.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        if self.in_turn:
            self._begin(self.epoch)
            yield from self._whole_batches()
            return
        if self.epoch != self.running or not self.cycles:
            self._begin(self.epoch)
        # A round that was begun and left is drawn anew.
        del self.totals[self.num_in_rounds + 1 :], self.sums[self.num_in_rounds + 1 :]
        first = self.start[1] if self.running == self.start[0] else 0
        # Beside a longer loader this one begins again within an epoch, also where it is resumed.
        is_done = False
        while not is_done:
            for indices in self._drawn(self.num_rounds):
                step = len(self.totals) - 2
                if step >= first:
                    is_done = True
                    yield from self._shares(step, indices)
            num_before, self.num_in_rounds = self.num_in_rounds, len(self.totals) - 1
            self.num_rounds += 1
            # It is empty, or at its end.
            is_done |= self.num_in_rounds in (num_before, first) or not self.cycles
        if self.expected and self.cycles:
            self.expected = {}
            self._tell_of_other_batches()

    def _shares(self, step: int, indices: list[Any]) -> Iterator[Batch]:
        start = self.totals[step]
        for micro in range(self.num_micro_batches):
            low, high, _ = self._share(step * self.num_micro_batches + micro)
            yield Batch(indices[low - start : high - start] or indices[:1], self.running)

    def _whole_batches(self) -> Iterator[Batch]:
        drawn = self._drawn(0)
        while batches := list(islice(drawn, self.num_ranks)):
            is_mine = self.rank < len(batches)
            self.num_full_turns += is_mine
            yield Batch(batches[self.rank if is_mine else 0])

    def _extent(self, step: int) -> tuple[int, int]:
        start, *end = self.totals[step : step + 2]
        return start, end[0] - start if end else 0

    def has_ended(self, batch_idx: int) -> bool:
        """See ``Shares``."""
        return batch_idx // self.num_micro_batches + 1 >= len(self.totals)

    def is_filler(self, batch_idx: int) -> bool:
        """See ``Shares``."""
        if self.in_turn:
            return batch_idx >= self.num_full_turns
        return not self.has_ended(batch_idx) and super().is_filler(batch_idx)

    def num_samples_in(self, batch_idx: int) -> int | None:
        """See ``Shares``."""
        if not self.in_turn:
            return None if self.has_ended(batch_idx) else super().num_samples_in(batch_idx)
        number = batch_idx * self.num_ranks + (0 if self.is_filler(batch_idx) else self.rank)
        start, *end = self.totals[number : number + 2]
        return end[0] - start if end else None


def evaluation_batches(
    batches: Any, name: str, trainer: pl.Trainer | None, split: str, seed: int = 0
) -> SharedBatchSampler:
    """Give each process whole batches of an evaluation in turn.

    A share of them all is split batch by batch: nobody knows its number before it is drawn.
    """
    limit = getattr(trainer, LIMITS[split], None)
    num_ranks, rank = processes(trainer)
    return SharedBatchSampler(
        batches,
        name,
        num_ranks=num_ranks,
        rank=rank,
        seed=seed,
        in_turn=not isinstance(limit, float) or limit == 1.0,
        limit=limit if isinstance(limit, int) else None,
        is_fixed=True,
        cycles=False,
    )


def samplers_in(batches: Any) -> list[Any]:
    """A batch sampler and the samplers that it, or one of those, holds."""
    found = [batches]
    for sampler in found:
        held = vars(sampler).values() if hasattr(sampler, "__dict__") else ()
        found += [s for s in held if isinstance(s, Sampler) and all(s is not f for f in found)]
    return found
