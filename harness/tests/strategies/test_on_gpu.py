"""The same claims on CUDA devices: run with -m gpu, or -m multi_gpu where there are two."""

import pytest
import torch

from harness.strategies.ddp2 import DDP2Strategy
from harness.strategies.dp import DataParallelStrategy
from harness.strategies.parallel_forward import ParallelForward
from tests.strategies.parity import UPSTREAM_WARNINGS, losses
from tests.strategies.test_module_zoo import ZOO, assert_equal, made, two_steps

pytestmark = UPSTREAM_WARNINGS
SIZES = (30, 30, 10)


def two_shares_on_one_gpu():
    strategy = DataParallelStrategy()
    strategy.parallel_devices = [torch.device("cuda", 0)] * 2
    return strategy


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "bound"),
    # Half precision keeps 8 (bf16) or 11 bits (fp16): halves of a batch round differently.
    [("32-true", 1e-5), ("64-true", 1e-12), ("bf16-mixed", 2e-2), ("16-mixed", 5e-3)],
)
def test_two_shares_on_one_gpu_follow_one_device(precision, bound):
    how = {"accelerator": "gpu", "devices": 1, "precision": precision}
    parallel = losses(two_shares_on_one_gpu(), *SIZES, **how)
    assert parallel == pytest.approx(losses("auto", *SIZES, **how), abs=bound, rel=0)


# cuDNN wants an RNN's weights in one block; copies are made one by one.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.gpu
def test_every_module_kind_on_a_gpu():
    device = torch.device("cuda", 0)
    for name in ZOO:
        module, inputs = made(name)
        expected = two_steps(module, inputs)
        module, inputs = made(name)
        module, inputs = module.to(device), [x.to(device) for x in inputs]
        parallel = ParallelForward(module, [device] * 2)
        parallel.batch_sizes = (7,)
        actual = two_steps(module, inputs)
        parallel.remove()
        assert_equal(actual, expected, name, tolerance=1e-9)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("strategy", [DataParallelStrategy, DDP2Strategy])
def test_two_gpus_follow_one(strategy):
    expected = losses("auto", *SIZES, accelerator="gpu", devices=1)
    found = losses(strategy(), *SIZES, accelerator="gpu", devices=2)
    assert found == pytest.approx(expected, abs=1e-5, rel=0)
