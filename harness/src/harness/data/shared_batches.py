"""The batches of anybody's sampler, shared between processes: the only place that does."""

import logging
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import length_hint
from typing import Any

from torch.utils.data import Sampler

from harness.data.batches import Batch, BatchedDataset, SeededBatch, bounds
from harness.data.randomness import generators_in, mix, reseed, seeded_iteration
from harness.errors import UserError

log = logging.getLogger(__name__)


class SharedBatchSampler(Sampler[Batch]):
    """Share the batches of any batch sampler: torch's own, weighted, by length, or an owner's.

    The batch sampler alone decides what a global batch is. Every process draws the same ones from
    it, with generators that are seeded by (seed, epoch), and takes its part:

    - In training a balanced share of each batch, so a run that was stopped on 4 devices can go on
      with 2. A share without a sample reads one of another process, with weight 0, because every
      process must compute every step.
    - In an evaluation whole batches in turn, so that what looks at a whole batch sees what one
      process would. One process may have a batch more than another. Fewer batches than processes
      are split by samples.

    Args:
        batches: gives lists of indices, or of whatever the data set is read by.
        name: what a message calls it.
        dataset: what is read; generators, also its own, are seeded for each sample, unless it is a
            ``BatchedDataset``.
        num_ranks: processes that share the batches.
        rank: which of them this one is.
        num_micro_batches: batches that a process accumulates per optimizer step.
        seed: with the epoch, decides what the batch sampler draws.
        in_turn: give whole batches in turn, in the order of every epoch.
        splits_last: all processes have as many turns; the last one's batches are split by samples.
        limit: the most batches of an evaluation, over all processes.
        is_fixed: draw the same batches in every epoch, as an overfitting run needs.
        cycles: begin again within an epoch, beside a longer loader.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[Any]],
        name: str,
        *,
        dataset: Any = None,
        num_ranks: int = 1,
        rank: int = 0,
        num_micro_batches: int = 1,
        seed: int = 0,
        in_turn: bool = False,
        splits_last: bool = False,
        limit: int | None = None,
        is_fixed: bool = False,
        cycles: bool = True,
    ) -> None:
        self.batches: Any = batches
        self.name, self.limit = name, limit
        self.dataset = None if isinstance(dataset, BatchedDataset) else dataset
        self.num_ranks, self.rank, self.num_micro_batches = num_ranks, rank, num_micro_batches
        self.seed, self.in_turn, self.is_fixed = seed, in_turn, is_fixed or in_turn
        self.splits_last, self.cycles = splits_last, cycles
        self.epoch = 0
        self.start = (0, 0)  # the epoch and step at which a run goes on
        self.expected: dict[int, int] = {}  # checksums of the run that goes on, by step
        self.generators: list[Any] | None = None
        self.is_read = False  # by the loader
        self.reads_here = True  # no worker does
        self.sampler = self  # Lightning announces the epoch to `loader.batch_sampler.sampler`
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.running, self.num_rounds, self.num_in_rounds = epoch, 0, 0
        self.totals = [0]  # samples in the batches before each one of this epoch
        self.sums = [0]  # a checksum of the indices in the batches before each one
        self.sizes: list[int] = []  # of this process's batches in an evaluation
        self.first: list[Sequence[Any]] = []  # batches of a training, for the first-batch check

    def _drawn(self, num_round: int) -> Iterator[list[Any]]:
        """Draw the batches of a round, and count them."""
        seed = mix(self.seed, 0 if self.is_fixed else self.running, num_round)
        for sampler in samplers_in(self.batches):
            for value in list(getattr(sampler, "__dict__", {}).values()):
                reseed(value, seed)
        # torch's own samplers draw all they need for an epoch at its start.
        are_stock = {type(s).__module__ for s in samplers_in(self.batches)}
        drawn = seeded_iteration(self.batches, seed, are_stock == {"torch.utils.data.sampler"})
        if not self.in_turn:
            self.first = few(drawn)
            drawn = chain(self.first, drawn)
        for indices in islice(drawn, self.limit):
            batch, step = list(indices), len(self.totals) - 1
            self.totals.append(self.totals[-1] + len(batch))
            self.sums.append(zlib.crc32(as_bytes(batch), self.sums[-1]))
            if self.expected.pop(step, self.sums[-1]) != self.sums[-1]:
                log.warning(
                    "%s draws other batches than before the run was stopped: samples of this epoch "
                    "may be seen twice or not at all. Let it draw from torch's generator, and keep "
                    "no place of its own.",
                    self.name,
                )
            yield batch

    def __len__(self) -> int:
        num_batches = len(self.batches)  # TypeError: not every sampler has one
        if not self.in_turn:
            return num_batches * self.num_micro_batches
        turns, rest = divmod(min(num_batches, self.limit or num_batches), self.num_ranks)
        is_split = self.splits_last or turns == 0
        return turns + (rest > 0 if is_split else self.rank < rest)

    def settings(self) -> dict[str, Any]:
        """Return what the global batches depend on: a run that goes on must have the same."""
        size = length_hint(getattr(self.batches, "sampler", self.batches))  # 0 if nobody knows
        settings = {"sampler": self.name, "num_samples": size, "seed": self.seed}
        for name in ("batch_size", "drop_last"):
            settings[name] = getattr(self.batches, name, None)
        return settings

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next ``iter``, also of a sampler that has epochs of its own."""
        self.epoch = epoch
        for sampler in samplers_in(self.batches):
            if callable(announce := getattr(sampler, "set_epoch", None)):
                announce(epoch)

    def start_at(self, epoch: int, step: int) -> None:
        """Let ``epoch`` begin at a step; the length stays, as Lightning counts on from there."""
        self.start = (epoch, step)
        self.set_epoch(epoch)  # Lightning asks for the first batches before it announces the epoch

    def __iter__(self) -> Iterator[Batch]:
        self.is_read = True
        if self.generators is None and self.dataset is not None:
            self.generators = generators_in(self.dataset)
        for indices in self._turns() if self.in_turn else self._shares():
            epoch = 0 if self.in_turn else self.running
            if self.generators is None:
                yield Batch(indices, epoch)
            else:
                batch = SeededBatch(indices, epoch, self.seed, self.generators)
                yield batch.begin() if self.reads_here else batch

    def _shares(self) -> Iterator[list[Any]]:
        """This process's shares of one round of global batches, from the start on."""
        if self.epoch != self.running or not self.cycles:
            self._begin(self.epoch)
        # A round that was begun and left is drawn anew.
        del self.totals[self.num_in_rounds + 1 :], self.sums[self.num_in_rounds + 1 :]
        first = self.start[1] if self.running == self.start[0] else 0
        while True:
            for step, indices in enumerate(self._drawn(self.num_rounds), self.num_in_rounds):
                for micro in range(self.num_micro_batches) if step >= first else ():
                    low, high, _ = self._share(step * self.num_micro_batches + micro, self.rank)
                    start = self.totals[step]
                    yield indices[low - start : high - start] or indices[:1]
            num_before, self.num_in_rounds = self.num_in_rounds, len(self.totals) - 1
            self.num_rounds += 1
            # A run may go on in a later round.
            if self.num_in_rounds >= first or self.num_in_rounds == num_before or not self.cycles:
                return

    def _turns(self) -> Iterator[list[Any]]:
        """This process's batches of an evaluation."""
        self._begin(self.epoch)
        drawn, num = self._drawn(0), self.num_ranks
        turn = list(islice(drawn, num))
        is_split = self.splits_last or len(turn) < num
        while turn:
            following = list(islice(drawn, num))
            if is_split and sum(map(len, following)) < num:  # too few to be a turn of their own
                turn, following = turn + following, []
            mine = turn[self.rank : self.rank + 1]
            if is_split and len(turn) != num:
                mine = [self._split([index for batch in turn for index in batch])]
            for batch in mine:
                self.sizes.append(len(batch))
                yield batch
            turn = following

    def _split(self, indices: list[Any]) -> list[Any]:
        """This process's samples of an evaluation's last batches, which are fewer than processes.

        Raises:
            UserError: in every process, if one of them would have no sample.
        """
        if len(indices) < self.num_ranks:
            raise UserError(
                f"{self.name}: {len(indices)} samples are left for {self.num_ranks} processes.\n"
                "Use fewer processes, or another batch size."
            )
        if self.rank == 0:
            log.warning(
                "%s: its last batches are fewer than %d processes, and are split by samples: what "
                "looks at a whole batch sees a part.",
                self.name,
                self.num_ranks,
            )
        low, high = bounds(len(indices), self.rank, self.num_ranks)
        return indices[low:high]

    def _share(self, batch_idx: int, rank: int) -> tuple[int, int, int]:
        """A process's (first, one-past-last) position in the epoch, and the global size."""
        step, micro = divmod(batch_idx, self.num_micro_batches)
        if self.has_ended(batch_idx):
            return self.totals[-1], self.totals[-1], 0
        start, end = self.totals[step : step + 2]
        num_shares = self.num_micro_batches * self.num_ranks
        low, high = bounds(end - start, micro * self.num_ranks + rank, num_shares)
        return start + low, start + high, end - start

    def num_before(self, batch_idx: int) -> int:
        """Samples of all processes in the batches of an epoch before this one."""
        return self._share(batch_idx, 0)[0]

    def has_ended(self, batch_idx: int) -> bool:
        """Whether this loader gives nothing any more, while a longer one goes on beside it."""
        return batch_idx // self.num_micro_batches + 1 >= len(self.totals)

    def weight(self, batch_idx: int) -> float:
        """Factor that turns this batch's mean gradient into its term of the global mean.

        Processes and accumulated batches are averaged with equal weights by the framework;
        shares of unequal size must not be. It is 1 wherever the shares are equal.
        """
        if self.num_ranks * self.num_micro_batches == 1:
            return 1.0
        low, high, size = self._share(batch_idx, self.rank)
        if not size:
            raise UserError(
                f"{self.name}: the loader gives more batches than its batch_sampler, and processes "
                "cannot share them.\nLet it give one for each, or use one process."
            )
        return (high - low) * self.num_ranks * self.num_micro_batches / size

    def is_filler(self, batch_idx: int) -> bool:
        """Whether this process's share is empty, and it reads another's sample in its place."""
        low, high, size = self._share(batch_idx, self.rank)
        return not self.in_turn and size > 0 and low == high

    def num_samples_in(self, batch_idx: int) -> int | None:
        """Samples in this process's batch, a filler's as well; ``None`` where it has ended."""
        if self.in_turn:
            return self.sizes[batch_idx] if batch_idx < len(self.sizes) else None
        low, high, size = self._share(batch_idx, self.rank)
        return max(1, high - low) if size else None


def few(batches: Iterator[Sequence[Any]]) -> list[Sequence[Any]]:
    """Three batches, or up to eight small ones, with which modules are checked."""
    found: list[Sequence[Any]] = []
    for batch in batches:
        found.append(list(batch))
        if len(found) == 8 or (len(found) > 2 and sum(map(len, found)) > 61):
            break
    return found


def samplers_in(batches: Any) -> list[Any]:
    """A batch sampler and the samplers that it, or one of those, holds."""
    found = [batches]
    for sampler in found:
        held = vars(sampler).values() if hasattr(sampler, "__dict__") else ()
        found += [s for s in held if isinstance(s, Sampler) and all(s is not f for f in found)]
    return found


def as_bytes(indices: list[Any]) -> bytes:
    """Return the same bytes for the same indices in every process: of integers, or of any kind."""
    try:
        return array("q", indices).tobytes()  # ten times as fast as repr
    except (TypeError, OverflowError):
        return repr(indices).encode()
