"""How many worker processes a run needs to read its data: measured, not guessed."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from harness.data.randomness import kept_generators

# A batch that is read in fewer seconds costs a step no more than receiving it from a worker.
RECEIVING_SECONDS = 0.001
# A number of workers within 10 % of the fastest counts as equally fast.
EQUALLY_FAST = 0.9
# Seconds for each number of workers; each worker reads at least so many batches.
SECONDS_EACH, NUM_ROUNDS = 0.5, 3


def candidates(num_cores: int) -> list[int]:
    """0, 1, 2, 4, 8, … up to the number of cores."""
    return [0, *(2**k for k in range(num_cores.bit_length()) if 2**k < num_cores), num_cores]


def seconds_per_batch(loader: DataLoader[Any]) -> float:
    """Read an endless loader for a while, once its workers have started and are all busy."""
    num_workers = loader.num_workers
    with kept_generators():
        batches = iter(loader)
        # Batches that were read ahead while workers started would count as read in no time.
        for _ in range(max(1, num_workers * (loader.prefetch_factor or 0))):
            next(batches)
        start, count = time.perf_counter(), 0
        while count < NUM_ROUNDS * num_workers or time.perf_counter() - start < SECONDS_EACH:
            # Workers read at the same time: the count is fair only after a batch of each.
            for _ in range(max(1, num_workers)):
                next(batches)
            count += max(1, num_workers)
        spent = time.perf_counter() - start
    del batches  # ends the workers
    return spent / count


def measure(
    make_loader: Callable[[int], DataLoader[Any]], numbers: Sequence[int]
) -> dict[int, float]:
    """Measure the seconds per batch with growing numbers of workers, until more do not help."""
    found: dict[int, float] = {}
    for number in numbers:
        found[number] = seconds_per_batch(make_loader(number))
        is_fast_alone = number == 0 and found[0] < RECEIVING_SECONDS
        if is_fast_alone or (number > 1 and best(found) != number):
            break
    return found


def best(found: dict[int, float]) -> int:
    """The least number of workers that is as fast as any; 0 where it reads faster than they.

    One worker is worth as much as none that is as fast, for it reads beside the step.
    """
    if found[0] < RECEIVING_SECONDS or len(found) == 1:
        return 0
    fastest = min(seconds for number, seconds in found.items() if number)
    if found[0] < EQUALLY_FAST * fastest:
        return 0
    return next(n for n, seconds in found.items() if n and seconds * EQUALLY_FAST <= fastest)
