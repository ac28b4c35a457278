"""dp follows one device; whole runs under all strategies: tests/verdicts."""

from typing import Any

import pytest
import torch

from harness.strategies.ddp2 import DDP2Strategy
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


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "bound"),
    # Half precision keeps 8 (bf16) or 11 bits (fp16): halves of a batch round differently.
    [("32-true", 1e-5), ("64-true", 1e-12), ("bf16-mixed", 2e-2), ("16-mixed", 5e-3)],
)
def test_two_shares_on_one_gpu_follow_one_device(precision: str, bound: float) -> None:
    how = {"accelerator": "gpu", "devices": 1, "precision": precision}
    strategy = DataParallelStrategy()
    strategy.parallel_devices = [torch.device("cuda", 0)] * 2
    found, expected = (losses(one, 30, 30, 10, **how) for one in (strategy, "auto"))
    assert found == pytest.approx(expected, abs=bound, rel=0)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("strategy", [DataParallelStrategy, DDP2Strategy])
def test_two_gpus_follow_one(strategy: Any) -> None:
    expected = losses("auto", 30, 30, 10, accelerator="gpu", devices=1)
    found = losses(strategy(), 30, 30, 10, accelerator="gpu", devices=2)
    assert found == pytest.approx(expected, abs=1e-5, rel=0)
