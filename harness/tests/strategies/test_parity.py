"""dp follows one device; whole runs under all strategies: tests/verdicts."""

from typing import Any

import pytest

from harness.strategies.dp import DataParallelStrategy
from tests.strategies.parity import UPSTREAM_WARNINGS, losses

pytestmark = UPSTREAM_WARNINGS


@pytest.mark.parametrize(
    ("sizes", "settings", "bound"),
    [
        ((30, 30, 10), {}, 1e-12),
        ((30, 30, 1), {}, 1e-12),
        ((30, 30, 30, 10), {"accumulate_grad_batches": 2}, 1e-12),
        ((24,), {"gradient_clip_val": 0.05}, 1e-12),
        ((24,), {"precision": "32-true"}, 1e-6),
        # bf16 keeps 8 bits: sums over parts of a batch round otherwise than those of the whole.
        ((24,), {"precision": "bf16-mixed"}, 5e-3),
    ],
)
def test_dp_follows_one_device(sizes: Any, settings: dict[str, Any], bound: float) -> None:
    settings = {"precision": "64-true"} | settings
    expected = losses("auto", *sizes, devices=1, **settings)
    for num_devices in (2, 3, 4):
        found = losses(DataParallelStrategy(), *sizes, devices=num_devices, **settings)
        assert found[-1] < found[0]
        assert found == pytest.approx(expected, abs=bound, rel=0)
