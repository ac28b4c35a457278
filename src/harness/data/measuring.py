"""How many worker processes feed a run: measured with its own data set, transforms and batches."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Sampler

from harness.data.batches import Batch, GlobalBatchSampler
from harness.data.seeded_samples import kept_generators

# Reading a batch in less costs a step no more than to take it over from a worker.
RECEIVING_SECONDS = 0.001
# Of the fastest, what is as good.
AS_GOOD = 0.9
# Of all workers, whatever time they take.
NUM_ROUNDS = 3
# Of a run's start, with data.num_workers=auto.
SECONDS_EACH, SECONDS_IN_ALL = 0.5, 20.0


@dataclass
class Measured:
    """What a number of workers has done.

    Args:
        num_workers: 0 reads in the training process.
        seconds_per_batch: from one batch to the next, while nothing else is computed.
        seconds_of_step: of it, what every step pays: without workers all of it; with them, what
            the training process does to take a batch over.
    """

    num_workers: int
    seconds_per_batch: float
    seconds_of_step: float


class Endless(Sampler[Batch]):
    """One epoch of a training order after another."""

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield from self.sampler
            self.sampler.set_epoch(self.sampler.epoch + 1)


def candidates(num_cores: int) -> list[int]:
    """0, 1, 2, 4, 8, … up to the number of cores."""
    return [0, *(2**k for k in range(num_cores.bit_length()) if 2**k < num_cores), num_cores]


def measure(loader: DataLoader[Any], seconds: float) -> Measured:
    """Read batches for about ``seconds``, once the workers have started and are all busy."""
    num_workers = loader.num_workers
    with kept_generators():
        batches = iter(loader)
        # What was read ahead, while workers started, would count as read in no time.
        for _ in range(max(1, num_workers * (loader.prefetch_factor or 0))):
            next(batches)
        start, busy, count = time.perf_counter(), time.thread_time(), 0
        while count < NUM_ROUNDS * num_workers or time.perf_counter() - start < seconds:
            # Workers work side by side, so only after a batch of each is the count a fair one.
            for _ in range(max(1, num_workers)):
                next(batches)
            count += max(1, num_workers)
        spent, busy = time.perf_counter() - start, time.thread_time() - busy
    del batches  # ends the workers
    return Measured(num_workers, spent / count, (busy if num_workers else spent) / count)


def measure_all(
    make_loader: Callable[[int], DataLoader[Any]],
    numbers: Sequence[int],
    seconds: float,
    num_rounds: int = 3,
) -> list[Measured]:
    """Measure each number of workers in turn, several times; medians.

    In turn, because the first ones read from the disk what the later ones find in memory.
    """
    rounds = [[measure(make_loader(n), seconds) for n in numbers] for _ in range(num_rounds)]
    return [
        Measured(
            same[0].num_workers,
            statistics.median(m.seconds_per_batch for m in same),
            statistics.median(m.seconds_of_step for m in same),
        )
        for same in zip(*rounds, strict=True)
    ]


def measure_briefly(
    make_loader: Callable[[int], DataLoader[Any]], numbers: Sequence[int]
) -> list[Measured]:
    """Measure until more workers do not help, or time is up."""
    start, found = time.perf_counter(), list[Measured]()
    for number in numbers:
        found.append(measure(make_loader(number), SECONDS_EACH))
        if found[-1].seconds_of_step < RECEIVING_SECONDS and number == 0:
            break
        is_past_the_knee = number > 1 and (
            found[-1].seconds_per_batch > found[-2].seconds_per_batch * AS_GOOD
        )
        if is_past_the_knee or time.perf_counter() - start > SECONDS_IN_ALL:
            break
    return found


def knee(found: Sequence[Measured]) -> int:
    """The least number of workers that is as good as any.

    None where reading costs a step no more than to take batches over from workers, which read
    while the step is computed.
    """
    alone, *helped = found
    if not helped:
        return alone.num_workers
    fastest = min(m.seconds_per_batch for m in helped)
    least = next(m for m in helped if m.seconds_per_batch * AS_GOOD <= fastest)
    worth = max(2 * least.seconds_of_step, RECEIVING_SECONDS)
    return least.num_workers if alone.seconds_of_step > worth else alone.num_workers
