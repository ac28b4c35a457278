"""How long a run waits for data, and how many worker processes it needs: measured, not guessed."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from harness.data.randomness import kept_generators

# A batch that is read in fewer seconds costs a step no more than receiving it from a worker.
RECEIVING_SECONDS = 0.001
# A number of workers within 10 % of the fastest counts as equally fast.
EQUALLY_FAST = 0.9
# Each worker reads at least this many batches in a measurement, however long that takes.
NUM_ROUNDS = 3
# At the start of a run with data.num_workers=auto: seconds for each number, and for all numbers.
SECONDS_EACH, SECONDS_IN_ALL = 0.5, 20.0


@dataclass
class Measured:
    """The speed of reading with a number of workers."""

    num_workers: int  # 0 reads in the training process
    seconds_per_batch: float  # from one batch to the next, while nothing else is computed
    # What lengthens every step: all of it without workers; with workers the processor time that
    # the training process spends on receiving.
    seconds_of_step: float


class Endless:
    """The batches of one epoch after another, without end."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.batches


def candidates(num_cores: int) -> list[int]:
    """0, 1, 2, 4, 8, … up to the number of cores."""
    return [0, *(2**k for k in range(num_cores.bit_length()) if 2**k < num_cores), num_cores]


def measure(loader: DataLoader[Any], seconds: float) -> Measured:
    """Read batches for about ``seconds``, once the workers have started and are all busy."""
    num_workers = loader.num_workers
    with kept_generators():
        batches = iter(loader)
        # Batches that were read ahead while workers started would count as read in no time.
        for _ in range(max(1, num_workers * (loader.prefetch_factor or 0))):
            next(batches)
        start, busy, count = time.perf_counter(), time.thread_time(), 0
        while count < NUM_ROUNDS * num_workers or time.perf_counter() - start < seconds:
            # Workers read at the same time: the count is fair only after a batch of each.
            for _ in range(max(1, num_workers)):
                next(batches)
            count += max(1, num_workers)
        spent, busy = time.perf_counter() - start, time.thread_time() - busy
    del batches  # ends the workers
    return Measured(num_workers, spent / count, (busy if num_workers else spent) / count)


def measure_briefly(
    make_loader: Callable[[int], DataLoader[Any]], numbers: Sequence[int]
) -> list[Measured]:
    """Measure growing numbers of workers until more do not help, or time is up."""
    start, found = time.perf_counter(), list[Measured]()
    for number in numbers:
        found.append(measure(make_loader(number), SECONDS_EACH))
        if found[-1].seconds_of_step < RECEIVING_SECONDS and number == 0:
            break
        is_past_the_knee = number > 1 and (
            found[-1].seconds_per_batch > found[-2].seconds_per_batch * EQUALLY_FAST
        )
        if is_past_the_knee or time.perf_counter() - start > SECONDS_IN_ALL:
            break
    return found


def knee(found: Sequence[Measured]) -> int:
    """The least number of workers that is equally fast as the fastest.

    It is 0 where reading costs a step no more than receiving batches from workers, which read
    while the step is computed.
    """
    alone, *helped = found
    if not helped:
        return alone.num_workers
    fastest = min(m.seconds_per_batch for m in helped)
    least = next(m for m in helped if m.seconds_per_batch * EQUALLY_FAST <= fastest)
    worth = max(2 * least.seconds_of_step, RECEIVING_SECONDS)
    return least.num_workers if alone.seconds_of_step > worth else alone.num_workers
