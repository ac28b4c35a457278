"""What is counted is what torch's own counter counts, and the step is the same by bit."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from harness.strategies.parallel_forward import ParallelForward
from harness.upstream import step_flops
from harness.upstream.step_flops import StepFlops

IMAGES, SEQUENCES = torch.ones(4, 3, 8, 8), torch.ones(4, 6, 8)
CONVOLUTIONS = nn.Sequential(
    *(nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    *(nn.ConvTranspose2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(72, 2)),
)


def penalised() -> Tensor:
    """The gradient of a gradient."""
    inputs = IMAGES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(CONVOLUTIONS(inputs).sum(), inputs, create_graph=True)
    return gradient.square().sum()


def partly() -> Tensor:
    with torch.no_grad():
        CONVOLUTIONS(IMAGES)
    with torch.inference_mode():
        CONVOLUTIONS(IMAGES)
    return CONVOLUTIONS(IMAGES).sum()


recurrent, layer = nn.GRU(8, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
STEPS: dict[str, Callable[[], Tensor]] = {
    "convolutions": lambda: CONVOLUTIONS(IMAGES).sum(),
    "recurrent": lambda: recurrent(SEQUENCES)[0].sum(),
    "attention in parts": lambda: layer(SEQUENCES).sum(),
    "einsum": lambda: torch.einsum("bsd,btd->bst", SEQUENCES, layer.norm1.weight * SEQUENCES).sum(),
    "partly without gradients": partly,
}


def count(step: Callable[[], Any]) -> float:
    counting = StepFlops()
    step()
    counting.stop()
    return counting.end()


@pytest.mark.parametrize("name", STEPS)
def test_sum_is_that_of_torchs_own_counter(name: str) -> None:
    def step() -> None:
        STEPS[name]().backward()

    with FlopCounterMode(display=False) as counter:
        step()
    assert count(step) == counter.get_total_flops() > 0


def test_gradient_penalty_is_counted_where_torchs_counter_fails() -> None:
    with (
        pytest.raises(RuntimeError, match="currently not supported"),
        FlopCounterMode(display=False),
    ):
        penalised()
    once = count(lambda: CONVOLUTIONS(IMAGES.clone().requires_grad_()).sum())
    assert 2 * once < count(lambda: penalised().backward()) < 8 * once


def test_attention_counts_on_a_cpu_as_on_a_gpu() -> None:
    query = torch.rand(2, 3, 16, 8, requires_grad=True)

    def step() -> None:
        F.scaled_dot_product_attention(query, query, query).sum().backward()

    forward = 2 * 2 * (2 * 3 * 16 * 16 * 8)  # two products
    assert count(step) == forward + 2.5 * forward  # backward computes one of them again


def test_what_has_no_formula_is_not_known() -> None:
    lstm, compiled = nn.LSTM(8, 8), torch.compile(CONVOLUTIONS, backend="aot_eager")
    assert math.isnan(count(lambda: lstm(SEQUENCES)))
    for _ in range(2):  # compiled in the first
        assert math.isnan(count(lambda: compiled(IMAGES)))


def test_trials_of_parallel_calls_are_none_of_the_step() -> None:
    net = nn.Linear(8, 8)
    parallel = ParallelForward(net, [torch.device("cpu")] * 2)
    parallel.batch_sizes = (4,)
    assert count(lambda: parallel(SEQUENCES[:, 0])) == 2 * 4 * 8 * 8


def test_step_that_is_counted_is_the_same_by_bit_where_torchs_counter_changes_it() -> None:
    """Of ``prod`` torch computes another derivative while a dispatch mode is active."""
    torch.manual_seed(0)
    factors = torch.rand(50, 40, requires_grad=True)

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad(factors.prod(1).sum(), factors)
        return found

    plain, counting = gradient(), StepFlops()
    counted = gradient()
    counting.stop()
    counting.end()
    with FlopCounterMode(display=False):
        changed = gradient()
    assert torch.equal(plain, counted)
    assert not torch.equal(plain, changed)  # if they are equal, the public counter would do


def test_nothing_is_written_to_the_screen(capfd: pytest.CaptureFixture[str]) -> None:
    assert count(lambda: SEQUENCES @ SEQUENCES.mT) > 0
    assert capfd.readouterr() == ("", "")


def test_second_counter_at_once_knows_nothing() -> None:
    with_other = StepFlops()
    assert math.isnan(count(lambda: SEQUENCES @ SEQUENCES.mT))
    with_other.stop()
    with_other.end()


def count_often(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    step_flops.QUIET_SECONDS, step_flops.count = 0.01, len  # soon, for many attempts
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    net = DistributedDataParallel(layers, bucket_cap_mb=0.0001)  # an operation for each tensor
    for _ in range(100):
        assert count(lambda: net(SEQUENCES[:, 0]).sum().backward()) > 0


def test_processes_outlive_the_operations_that_end_in_other_threads(tmp_path: Path) -> None:
    """Without ``stop`` and the moment behind it, one of them crashes or hangs within the loop."""
    spawn(count_often, (str(tmp_path / "meeting"),), nprocs=2)
