"""The sampler that splits the global batches of any batch sampler between the ranks.

In: the batch sampler of the user's loader. Out: this rank's ``Batch``es, which the loader reads.
Every rank draws the same global batches, so no communication is needed. Next: ``parity`` reads the
weight of each local batch.
"""

import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain, islice, repeat
from operator import length_hint
from types import MappingProxyType
from typing import Any

from torch.utils.data import Sampler

from harness.data.batches import Batch, BatchedDataset, LocalBatchCounts, local_bounds
from harness.data.randomness import (
    generators_in,
    mix_seed,
    preserved_generators,
    reseed,
    seed_generators,
    seeded_iteration,
)
from harness.data.samplers import numbers_in, samplers_in
from harness.data.stock_order import ShuffledBatches, checksum, compact, is_stock_shuffle
from harness.errors import UserError

log = logging.getLogger(__name__)
NUM_FIRST = 8  # batches of an epoch that the parity check may use


@dataclass(eq=False, repr=False)
class SharedBatchSampler(LocalBatchCounts, Sampler[Batch]):
    """Yield this rank's indices of each global batch of a batch sampler.

    A round is one iteration over ``batches``. An epoch has one round, or several if the loader is
    shorter than another loader of the same step. ``batches`` may be torch's sampler, a weighted
    sampler, a sampler that sorts by length, or the user's own. Only ``batches`` decides which
    samples form a global batch. Every rank draws the same global batches, with generators that are
    seeded by (seed, epoch, round), and then selects its own indices:

    - Training: each rank gets a local batch of each global batch, so a run stopped on 4 devices
      can continue on 2. A rank without samples computes a sample again with weight 0, because
      every rank must compute every step.
    - Evaluation: the ranks get whole batches in turn, so code that uses a whole batch gets the
      batches of a single process. A rank may have one batch more than another. If there are fewer
      batches than ranks, the batches are split by samples.
    """

    batches: Any  # yields lists of indices, or lists of any other keys of the data set
    name: str  # the loader's name in messages
    _: KW_ONLY
    dataset: Any = None  # its samples are seeded, unless it is a ``BatchedDataset``
    num_ranks: int = 1  # ranks that split each global batch
    rank: int = 0  # of this process
    num_micro_batches: int = 1  # batches that a rank accumulates per optimizer step
    seed: int = 0  # seeds the batch sampler, with the epoch
    is_round_robin: bool = False  # evaluation: whole batches in turn, the same in every epoch
    # If the number of batches is not a multiple of the number of ranks, split the last batches by
    # samples. With fsdp, forward is a collective operation, so each rank needs equally many.
    splits_last: bool = False
    limit: int | None = None  # at most this many batches of an evaluation, over all ranks
    is_fixed: bool = False  # the same batches in every epoch, for trainer.overfit_batches
    cycles: bool = True  # start another round within an epoch, next to a longer loader
    reads_here: bool = True  # this process reads the samples, and no worker

    def __post_init__(self) -> None:
        self.dataset = None if isinstance(self.dataset, BatchedDataset) else self.dataset
        self.num_local_batches = self.num_ranks * self.num_micro_batches
        self.is_fixed |= self.is_round_robin
        self.epoch = 0  # of the next ``iter``
        self.start = (0, 0)  # the epoch and step at which a run resumes
        self.expected: dict[int, int] = {}  # checksums from the checkpoint, by step
        self.generators: list[Any] | None = None  # of the data set; found at the first batch
        self.was_iterated = False  # whether the loader has iterated over this sampler
        self.sampler = self  # Lightning calls `loader.batch_sampler.sampler.set_epoch`
        # This rank's batches of an evaluation; None until they are drawn.
        self.evaluation_batches: list[Sequence[Any]] | None = None
        self.initial_numbers = numbers_in(self.batches)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        # The epoch, the number of its completed rounds, and of the global batches in them.
        self.running, self.num_rounds, self.num_in_rounds = self.epoch, 0, 0
        # By global batch of this epoch: the samples before it, and a checksum of their indices.
        self.totals, self.sums = array("q", [0]), array("I", [0])
        self.first: list[list[Any]] = []  # the first training batches, for the parity check
        self.numbers = self._changed_numbers()

    def _draw(self, num_skipped: int = 0) -> Iterator[list[Any]]:
        """Yield the global batches of one round, and count their samples.

        The first ``num_skipped`` batches may be left out, but their samples are counted.
        """
        seed = mix_seed(self.seed, 0 if self.is_fixed else self.running, self.num_rounds)
        samplers = samplers_in(self.batches)
        for sampler in samplers:
            for value in list(getattr(sampler, "__dict__", {}).values()):
                reseed(value, seed)
        drawn: Iterator[Any]
        if is_stock_shuffle(self.batches):
            with preserved_generators():
                seed_generators(seed)
                shuffled = ShuffledBatches(self.batches)
            if not self.is_round_robin:
                self.first = [*islice(shuffled.iterate(), NUM_FIRST)]
            self._skip(shuffled, num := min(num_skipped, len(shuffled)))
            drawn = shuffled.iterate(num)
        else:
            # torch's own samplers draw all random numbers of an epoch at its start.
            draws_once = {type(s).__module__ for s in samplers} == {"torch.utils.data.sampler"}
            drawn = seeded_iteration(self.batches, seed, draws_once)
            if not self.is_round_robin:
                self.first = [list(batch) for batch in islice(drawn, NUM_FIRST)]
                drawn = chain(self.first, drawn)
        for indices in islice(drawn, self.limit):
            batch, step = list(indices), len(self.totals) - 1
            self.totals.append(self.totals[-1] + len(batch))
            self.sums.append(checksum(batch, self.sums[-1]))
            if self.expected.pop(step, self.sums[-1]) != self.sums[-1]:
                log.warning(
                    "%s draws other batches than before the run was stopped: this epoch may "
                    "repeat or skip samples. Let the sampler draw from torch's generator, and "
                    "start from the beginning in each __iter__.",
                    self.name,
                )
            yield batch

    def _skip(self, shuffled: ShuffledBatches, num: int) -> None:
        """Count the first batches of a round without making them."""
        if num:
            start, before = self.totals[-1], self.sums[-1]
            sizes = range(start + shuffled.size, start + num * shuffled.size, shuffled.size)
            last = start + min(num * shuffled.size, len(shuffled.order))
            self.totals.extend(chain(sizes, [last]))
            self.sums.extend(chain(repeat(0, num - 1), [shuffled.checksum(num, before)]))

    def __len__(self) -> int:
        if self.is_round_robin:
            return len(self._evaluation_batches())
        return len(self.batches) * self.num_micro_batches  # TypeError if it has no length

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the batches. A resumed run must have the same."""
        size = length_hint(getattr(self.batches, "sampler", self.batches))  # 0 if unknown
        settings = {"sampler": self.name, "num_samples": size, "seed": self.seed}
        for name in ("batch_size", "drop_last"):
            settings[name] = getattr(self.batches, name, None)
        return settings

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter``, and call ``set_epoch`` of each wrapped sampler."""
        self.epoch = epoch
        for sampler in samplers_in(self.batches):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)

    def start_at(
        self, epoch: int, step: int, saved: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Let ``epoch`` begin at ``step``; ``saved`` is the result of ``state_at`` there.

        ``len`` stays that of the whole epoch, because Lightning counts from ``step``.
        """
        for sampler, numbers in zip(
            samplers_in(self.batches), saved.get("numbers", ()), strict=False
        ):
            vars(sampler).update(numbers)
        self.numbers = self._changed_numbers()
        self.start = (epoch, step)
        expected = saved.get("checksum")
        self.expected = {} if expected is None else {step: expected}
        self.set_epoch(epoch)  # Lightning reads the first batches before it calls set_epoch

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state that a checkpoint saves to resume at this step of this epoch.

        Counters of the user's samplers, such as ``self.num_epochs += 1``, have the values of the
        epoch's start: a resumed run draws the epoch again from its start.
        """
        is_running = epoch == self.running
        return {
            "settings": self.settings(),
            "numbers": self.numbers if is_running else self._changed_numbers(),
            "checksum": self.sums[step + 1] if is_running and step + 1 < len(self.sums) else None,
        }

    def _changed_numbers(self) -> list[dict[str, Any]]:
        """Return, for each sampler, its number attributes that changed since construction."""
        return [
            {name: value for name, value in now.items() if before.get(name) != value}
            for now, before in zip(numbers_in(self.batches), self.initial_numbers, strict=False)
        ]

    def __iter__(self) -> Iterator[Batch]:
        self.was_iterated = True
        is_training = not self.is_round_robin
        for indices in self._local_batches() if is_training else self._evaluation_batches():
            batch = self.batch(indices)
            yield batch.begin() if self.reads_here else batch

    def batch(self, indices: Sequence[Any]) -> Batch:
        """Return the indices as a ``Batch``, which seeds the generators of the data set."""
        if self.generators is None and self.dataset is not None:
            self.generators = generators_in(self.dataset)
        seed = None if self.dataset is None else self.seed
        return Batch(
            indices, 0 if self.is_round_robin else self.running, seed, self.generators or ()
        )

    def next_batch_idx(self) -> int:
        """Return the batch index, within its epoch, of the next ``iter``'s first batch."""
        is_new = self.epoch != self.running or not self.cycles
        first = self.start[1] if self.epoch == self.start[0] else 0
        return max(0 if is_new else self.num_in_rounds, first) * self.num_micro_batches

    def _local_batches(self) -> Iterator[list[Any]]:
        """Yield this rank's indices of one round of global batches, from ``self.start`` on."""
        if self.epoch != self.running or not self.cycles:
            self._begin_epoch()
        # If the last round was left unfinished, it is drawn again.
        del self.totals[self.num_in_rounds + 1 :], self.sums[self.num_in_rounds + 1 :]
        first = self.start[1] if self.running == self.start[0] else 0
        while True:
            for indices in self._draw(max(0, first - self.num_in_rounds)):
                step = len(self.totals) - 2
                for micro in range(self.num_micro_batches) if step >= first else ():
                    number = micro * self.num_ranks + self.rank  # of the local batch
                    low, high = local_bounds(len(indices), number, self.num_local_batches)
                    yield indices[low:high] or indices[:1]
            num_before, self.num_in_rounds = self.num_in_rounds, len(self.totals) - 1
            self.num_rounds += 1
            # A run may resume in a later round.
            if self.num_in_rounds >= first or self.num_in_rounds == num_before or not self.cycles:
                return

    def _evaluation_batches(self) -> list[Sequence[Any]]:
        """Return this rank's batches of an evaluation, drawn once and used in every epoch.

        Raises:
            UserError: on all ranks, if one of them would have no sample.
        """
        if self.evaluation_batches is not None:
            return self.evaluation_batches
        drawn, num = [compact(batch) for batch in self._draw()], self.num_ranks
        num_whole = len(drawn) // num * num
        if len(drawn) == num_whole or (num_whole and not self.splits_last):
            self.evaluation_batches = drawn[self.rank :: num]
            return self.evaluation_batches
        if num_whole and sum(map(len, drawn[num_whole:])) < num:  # fewer samples than ranks
            num_whole -= num
        rest = [index for batch in drawn[num_whole:] for index in batch]
        if len(rest) < num:
            raise UserError(
                f"{self.name}: {len(rest)} samples are too few for {num} processes.\n"
                f"Use at most {len(rest)} processes, or more samples."
            )
        if self.rank == 0:
            log.warning(
                "%s: the number of batches is not a multiple of %d, the number of processes, so "
                "the last batches are split by samples. A metric of whole batches then gets other "
                "batches than with one process.",
                self.name,
                num,
            )
        low, high = local_bounds(len(rest), self.rank, num)
        self.evaluation_batches = [*drawn[self.rank : num_whole : num], rest[low:high]]
        return self.evaluation_batches

    def counts(self, batch_idx: int) -> tuple[int, int]:
        """See ``LocalBatchCounts``."""
        if self.is_round_robin:  # each evaluation batch belongs to one rank
            batches = self._evaluation_batches()
            size = len(batches[batch_idx]) if batch_idx < len(batches) else 0
            return size, size
        step, micro = divmod(batch_idx, self.num_micro_batches)
        if step + 1 >= len(self.totals):
            return 0, 0
        size = self.totals[step + 1] - self.totals[step]
        low, high = local_bounds(size, micro * self.num_ranks + self.rank, self.num_local_batches)
        return high - low, size

    def num_before(self, batch_idx: int) -> int:
        """Return how many samples of the epoch, over all ranks, come before this batch."""
        step, micro = divmod(batch_idx, self.num_micro_batches)
        first = self.totals[min(step, len(self.totals) - 1)]
        size = self.counts(batch_idx)[1]
        return first + local_bounds(size, micro * self.num_ranks, self.num_local_batches)[0]
