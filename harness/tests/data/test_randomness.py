"""Random numbers are uniform, and belong to (seed, epoch, sample)."""

import numpy as np

from harness.data.randomness import mix_seed, uniform


def test_numbers_belong_to_the_sample_not_to_the_batch() -> None:
    whole = uniform(1, 2, range(100), 3)
    assert np.array_equal(whole[[7, 93]], uniform(1, 2, [7, 93], 3))


def test_numbers_are_uniform() -> None:
    """Moments of 200,000 numbers, five standard errors wide."""
    draws = uniform(0, 0, range(100_000), 2)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 5 * np.sqrt(1 / 12 / draws.size)
    assert abs(draws.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / draws.size)


def test_mix_separates_neighbours_and_never_changes() -> None:
    assert len({mix_seed(a, b) for a in range(30) for b in range(30)}) == 900
    assert mix_seed(1, 2) != mix_seed(2, 1)
    assert mix_seed(0) == 893442142816765029  # runs of an earlier version must be repeatable
