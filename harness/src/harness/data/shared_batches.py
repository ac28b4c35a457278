"""The sampler that shares the batches of any other one between processes.

In: the batch sampler of a loader's author. Out: this process's ``Batch``es, which the loader reads.
Every process draws the same batches, so nothing is sent. Next: ``exact`` asks for the weight of
each share.
"""

import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import chain, islice
from operator import length_hint
from types import MappingProxyType
from typing import Any

from torch.utils.data import Sampler

from harness.data.batches import Batch, BatchedDataset, ShareCounts, bounds
from harness.data.randomness import generators_in, mix, reseed, seeded_iteration
from harness.errors import UserError

log = logging.getLogger(__name__)
NUM_FIRST = 8  # batches of an epoch that the first-batch check may use
NUMBERS = (bool, int, float)


@dataclass(eq=False, repr=False)
class SharedBatchSampler(ShareCounts, Sampler[Batch]):
    """Share the batches of any batch sampler: torch's own, weighted, by length, or an owner's.

    The batch sampler alone decides what a global batch is. Every process draws the same ones from
    it, with generators that are seeded by (seed, epoch), and takes its part:

    - In training a balanced share of each batch, so a run that was stopped on 4 devices can go on
      with 2. A share without a sample reads one of another process, with weight 0, because every
      process must compute every step.
    - In an evaluation whole batches in turn, so that what looks at a whole batch sees what one
      process would. One process may have a batch more than another. Fewer batches than processes
      are split by samples.
    """

    batches: Any  # iterates over lists of indices, or of whatever the data set is read by
    name: str  # of the loader, in messages
    _: KW_ONLY
    dataset: Any = None  # its samples are seeded, unless it is a ``BatchedDataset``
    num_ranks: int = 1  # processes that share the batches
    rank: int = 0  # of this process
    num_micro_batches: int = 1  # batches that a process accumulates per optimizer step
    seed: int = 0  # with the epoch, decides what the batch sampler draws
    is_round_robin: bool = False  # whole batches in turn, the same in every epoch
    # Split the batches of the last turn by samples: fsdp's collective forward needs equal turns.
    splits_last: bool = False
    limit: int | None = None  # the most batches of an evaluation, over all processes
    is_fixed: bool = False  # the same batches in every epoch, as an overfitting run needs
    cycles: bool = True  # begin again within an epoch, beside a longer loader
    reads_here: bool = True  # no worker reads the samples

    def __post_init__(self) -> None:
        self.dataset = None if isinstance(self.dataset, BatchedDataset) else self.dataset
        self.num_shares = self.num_ranks * self.num_micro_batches
        self.is_fixed |= self.is_round_robin
        self.epoch = 0  # of the next ``iter``
        self.start = (0, 0)  # the epoch and step at which a run goes on
        self.expected: dict[int, int] = {}  # checksums that a checkpoint has, by step
        self.generators: list[Any] | None = None  # of the data set, once it is read
        self.is_read = False  # by the loader
        self.sampler = self  # Lightning announces the epoch to `loader.batch_sampler.sampler`
        self.turns: list[list[Any]] | None = None  # this process's batches of an evaluation
        self.initial_numbers = numbers_in(self.batches)
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.running, self.num_rounds, self.num_in_rounds = self.epoch, 0, 0
        self.totals = [0]  # samples in the batches before each one of this epoch
        self.sums = [0]  # a checksum of the indices in the batches before each one
        self.first: list[list[Any]] = []  # batches of a training, for the first-batch check
        self.numbers = self._changed_numbers()

    def _draw(self) -> Iterator[list[Any]]:
        """Draw the batches of a round, and count them."""
        seed = mix(self.seed, 0 if self.is_fixed else self.running, self.num_rounds)
        samplers = samplers_in(self.batches)
        for sampler in samplers:
            for value in list(getattr(sampler, "__dict__", {}).values()):
                reseed(value, seed)
        # torch's own samplers draw all that they need for an epoch at its start.
        draws_once = {type(s).__module__ for s in samplers} == {"torch.utils.data.sampler"}
        drawn = seeded_iteration(self.batches, seed, draws_once)
        if not self.is_round_robin:
            self.first = [list(batch) for batch in islice(drawn, NUM_FIRST)]
        for indices in islice(chain(self.first, drawn), self.limit):
            batch, step = list(indices), len(self.totals) - 1
            self.totals.append(self.totals[-1] + len(batch))
            self.sums.append(zlib.crc32(repr(batch).encode(), self.sums[-1]))
            if self.expected.pop(step, self.sums[-1]) != self.sums[-1]:
                log.warning(
                    "%s draws other batches than before the run was stopped: samples of this epoch "
                    "may be seen twice or not at all. Let it draw from torch's generator, and keep "
                    "no place of its own.",
                    self.name,
                )
            yield batch

    def __len__(self) -> int:
        if self.is_round_robin:
            return len(self._turns())
        return len(self.batches) * self.num_micro_batches  # TypeError: not every sampler has one

    def settings(self) -> dict[str, Any]:
        """Return what the global batches depend on, which a resumed run must have as well."""
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

    def start_at(
        self, epoch: int, step: int, saved: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Let ``epoch`` begin at a step, with what ``state_at`` has saved for this place.

        The length stays, as Lightning counts on from there.
        """
        for sampler, numbers in zip(
            samplers_in(self.batches), saved.get("numbers", ()), strict=False
        ):
            vars(sampler).update(numbers)
        self.numbers = self._changed_numbers()
        self.start = (epoch, step)
        checksum = saved.get("sum")
        self.expected = {} if checksum is None else {step: checksum}
        self.set_epoch(epoch)  # Lightning asks for the first batches before it announces the epoch

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a run goes on with this step of this epoch.

        Counters of samplers, as ``self.num_epochs += 1``, are those of the epoch's start: an epoch
        that is resumed is drawn again from there.
        """
        is_running = epoch == self.running
        return {
            "settings": self.settings(),
            "numbers": self.numbers if is_running else self._changed_numbers(),
            "sum": self.sums[step + 1] if is_running and step + 1 < len(self.sums) else None,
        }

    def _changed_numbers(self) -> list[dict[str, Any]]:
        """Return the numbers of each sampler that are not as they were made."""
        return [
            {name: value for name, value in now.items() if before.get(name) != value}
            for now, before in zip(numbers_in(self.batches), self.initial_numbers, strict=False)
        ]

    def __iter__(self) -> Iterator[Batch]:
        self.is_read = True
        for indices in self._turns() if self.is_round_robin else self._training_shares():
            batch = self.batch(indices)
            yield batch.begin() if self.reads_here else batch

    def batch(self, indices: list[Any]) -> Batch:
        """Return indices that seed the generators of what reads them."""
        if self.generators is None and self.dataset is not None:
            self.generators = generators_in(self.dataset)
        seed = None if self.dataset is None else self.seed
        return Batch(
            indices, 0 if self.is_round_robin else self.running, seed, self.generators or ()
        )

    def next_batch_idx(self) -> int:
        """Return the number, in its epoch, of the first batch that the next ``iter`` gives."""
        is_new = self.epoch != self.running or not self.cycles
        first = self.start[1] if self.epoch == self.start[0] else 0
        return max(0 if is_new else self.num_in_rounds, first) * self.num_micro_batches

    def _training_shares(self) -> Iterator[list[Any]]:
        """Give this process's shares of one round of global batches, from the start on."""
        if self.epoch != self.running or not self.cycles:
            self._begin_epoch()
        # A round that was begun and left is drawn anew.
        del self.totals[self.num_in_rounds + 1 :], self.sums[self.num_in_rounds + 1 :]
        first = self.start[1] if self.running == self.start[0] else 0
        while True:
            for step, indices in enumerate(self._draw(), self.num_in_rounds):
                for micro in range(self.num_micro_batches) if step >= first else ():
                    share = micro * self.num_ranks + self.rank
                    low, high = bounds(len(indices), share, self.num_shares)
                    yield indices[low:high] or indices[:1]
            num_before, self.num_in_rounds = self.num_in_rounds, len(self.totals) - 1
            self.num_rounds += 1
            # A run may go on in a later round.
            if self.num_in_rounds >= first or self.num_in_rounds == num_before or not self.cycles:
                return

    def _turns(self) -> list[list[Any]]:
        """Draw this process's batches of an evaluation, once for all epochs.

        If a process would have no sample, all of them refuse.
        """
        if self.turns is not None:
            return self.turns
        drawn, num = list(self._draw()), self.num_ranks
        num_whole = len(drawn) // num * num
        if len(drawn) == num_whole or (num_whole and not self.splits_last):
            self.turns = drawn[self.rank :: num]
            return self.turns
        if num_whole and sum(map(len, drawn[num_whole:])) < num:  # too few to be a turn
            num_whole -= num
        rest = [index for batch in drawn[num_whole:] for index in batch]
        if len(rest) < num:
            raise UserError(
                f"{self.name}: {len(rest)} samples are left for {num} processes.\n"
                "Use fewer processes, or another batch size."
            )
        if self.rank == 0:
            log.warning(
                "%s: its last batches are fewer than %d processes, and are split by samples: what "
                "looks at a whole batch sees a part.",
                self.name,
                num,
            )
        low, high = bounds(len(rest), self.rank, num)
        self.turns = [*drawn[self.rank : num_whole : num], rest[low:high]]
        return self.turns

    def counts(self, batch_idx: int) -> tuple[int, int]:
        """See ``ShareCounts``."""
        if self.is_round_robin:  # a batch of an evaluation is not shared
            turns = self._turns()
            size = len(turns[batch_idx]) if batch_idx < len(turns) else 0
            return size, size
        step, micro = divmod(batch_idx, self.num_micro_batches)
        if step + 1 >= len(self.totals):
            return 0, 0
        size = self.totals[step + 1] - self.totals[step]
        low, high = bounds(size, micro * self.num_ranks + self.rank, self.num_shares)
        return high - low, size

    def num_before(self, batch_idx: int) -> int:
        """Count the samples of all processes in the batches of an epoch before this one."""
        step, micro = divmod(batch_idx, self.num_micro_batches)
        first = self.totals[min(step, len(self.totals) - 1)]
        size = self.counts(batch_idx)[1]
        return first + bounds(size, micro * self.num_ranks, self.num_shares)[0]


def samplers_in(batches: Any) -> list[Any]:
    """List a batch sampler, and the samplers that it or one of those holds."""
    samplers = [batches]
    for sampler in samplers:  # which grows meanwhile
        held = vars(sampler).values() if hasattr(sampler, "__dict__") else ()
        samplers += [
            s for s in held if isinstance(s, Sampler) and all(s is not x for x in samplers)
        ]
    return samplers


def numbers_in(batches: Any) -> list[dict[str, Any]]:
    """Return the numbers among the attributes of each sampler of a batch sampler."""
    attributes = [getattr(sampler, "__dict__", {}) for sampler in samplers_in(batches)]
    return [{n: v for n, v in held.items() if type(v) in NUMBERS} for held in attributes]
