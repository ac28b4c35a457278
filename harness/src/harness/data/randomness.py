"""Random numbers that depend on (seed, epoch, sample), and not on the order of drawing.

Data sets that read whole batches call ``uniform``. All other code draws from the generators of
Python, NumPy and torch: the library seeds these before each use, and restores them afterwards.
"""

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
WITHOUT_GENERATORS = (torch.Tensor, np.ndarray, type, ModuleType, str, int, float)
END = object()  # stands for an item after an iterator's end


def mix_seed(*numbers: int) -> int:
    """Hash integers to a 63-bit seed; neighbouring inputs give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f"<{len(numbers)}q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(
    seed: int, epoch: int, indices: Sequence[int], num_draws: int
) -> npt.NDArray[np.float64]:
    """Return random numbers in [0, 1) that depend only on (seed, epoch, sample).

    The result has the shape (len(indices), num_draws). A counter-based generator (SplitMix64:
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) needs a
    few array operations per batch. Seeding a generator per sample would cost more than most
    augmentations.
    """
    samples = np.asarray(indices, dtype=np.uint64)[:, None]  # (B, 1)
    counter = samples * np.uint64(num_draws) + np.arange(num_draws, dtype=np.uint64)  # (B, D)
    increment, start = np.uint64(0x9E3779B97F4A7C15), np.uint64(mix_seed(seed, epoch))
    state = np.multiply(counter, increment, dtype=np.uint64) + start
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    mantissa: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64)
    return mantissa * 2.0**-53


def seed_generators(seed: int) -> None:
    """Seed the generators of ``random``, ``numpy.random`` and ``torch`` on the CPU."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the generators that ``seed_generators`` seeds."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore_generators(states: tuple[Any, ...]) -> None:
    """Set the generators to the states that ``generator_states`` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def same_states(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Return whether two results of ``generator_states`` are equal: nothing was drawn between."""
    (_, key, *rest), (_, other, *others) = before[1], after[1]
    is_same = before[0] == after[0] and rest == others and bool(np.array_equal(key, other))
    return is_same and torch.equal(before[2], after[2])


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore the generators at the end of the block, because code such as dropout uses them."""
    states = generator_states()
    try:
        yield
    finally:
        restore_generators(states)


def seeded_iteration(items: Iterable[T], seed: int, draws_once: bool = False) -> Iterator[T]:
    """Yield ``items``, whose iterator draws random numbers, as if no other code drew any.

    Args:
        items: the iterable.
        seed: seeds the generators before the first item.
        draws_once: whether the iterator draws only before its first item. The generators are then
            not saved and restored around the other items, which saves time.
    """
    with preserved_generators():
        seed_generators(seed)
        iterator, states = iter(items), generator_states()
    item: Any = None
    while True:
        if draws_once and item is not None:
            item = next(iterator, END)
        else:
            with preserved_generators():
                restore_generators(states)
                item = next(iterator, END)
                states = generator_states()
        if item is END:
            return
        yield item


def reseed(generator: Any, seed: int) -> None:
    """Seed a generator object of ``torch``, ``numpy`` or ``random``; ignore any other object."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


def generators_in(dataset: Any) -> list[Any]:
    """Return the generator objects that a data set or one of its transforms holds.

    The search looks at the first ten items of a list or a dict: enough for lists of transforms,
    and quick for lists of samples.
    """
    generators, queue, seen = list[Any](), [dataset], set[int]()
    for value in queue:  # the loop appends to it
        if id(value) in seen or isinstance(value, WITHOUT_GENERATORS):
            continue
        seen.add(id(value))
        if isinstance(value, GENERATORS):
            generators.append(value)
        elif len(queue) > 1000:
            continue
        elif isinstance(value, (list, tuple)):
            queue += value[:10]
        elif isinstance(value, dict):
            queue += [*value.values()][:10]
        elif hasattr(value, "__dict__"):
            queue += vars(value).values()
    return generators
