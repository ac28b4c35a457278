"""Replicas that differ by one bit stop the run, which names the tensor and the process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.errors import TrainingError
from harness.monitoring import replicas
from harness.monitoring.replicas import Replicas, sums_of_bits
from tests.conftest import slow, train_command
from tests.faults.fork_server import command
from tests.workers.disturb import disturb

DDP = ("strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
SHORT = (
    "model=mlp",
    "trainer.max_epochs=1",
    "test=false",
    "data.batch_size=300",
    "trainer.log_every_n_steps=5",
    "trainer.enable_progress_bar=false",
    "callbacks.replicas.every_n_steps=1",
)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "every_n_steps"), [*slow(("class_weights", 1)), ("net.layers.3.bias", "null")]
)
def test_rank_that_drifts_by_one_bit_stops_the_run(
    name: str, every_n_steps: int | str, tmp_path: Path
) -> None:
    """In a buffer that training does not change; and with no check but that before a checkpoint."""
    result = command(
        "train.py", *DDP, *SHORT, f"output_dir={tmp_path}",
        f"callbacks.replicas.every_n_steps={every_n_steps}",
        f"model.class_weights={[1.0] * 10}",
        *disturb(what="drift", name=name, rank=1),
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    message = f"Step 4: the replicas differ. {name} on rank 1 differs from that of rank 0"
    assert result.stderr.count(message) == 1
    assert "Traceback" not in result.stderr
    (run_dir,) = (tmp_path / "default").iterdir()
    assert message in (run_dir / "run.log").read_text()


def test_buffer_that_each_process_writes_from_its_own_samples_is_told(tmp_path: Path) -> None:
    """And none that is equal in all: gathered samples, a counter, an average of weights, norms."""
    words = (
        "model._target_=tests.workers.keeps_queue.KeepsQueue",
        "callbacks.learning_rate=null",
        "trainer.max_steps=3",
    )
    run_dir = train_command(tmp_path, *DDP, *SHORT, *words)
    said = "Buffer queue of KeepsQueue is written by each process from its own samples"
    for path in (tmp_path / "screen.txt", run_dir / "run.log"):
        assert path.read_text().count(said) == 1
        assert path.read_text().count("is written by each process") == 1
        assert "self.all_gather(x)" in path.read_text()


def test_any_bit_anywhere_changes_the_sum() -> None:
    for dtype in (torch.complex64, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.zeros(7).to(dtype)
        before = sums_of_bits([tensor, tensor[0]], CPU)
        bits = tensor.view(torch.uint8)
        for place in range(len(bits)):
            bits[place] ^= 1
            assert sums_of_bits([tensor, tensor[0]], CPU)[0] != before[0], (dtype, place)
            bits[place] ^= 1
        assert torch.equal(sums_of_bits([tensor, tensor[0]], CPU), before)


class LargestMade(TorchDispatchMode):
    """The most elements that an operation has made outside of its arguments' memory."""

    most = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        places = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for one in found if isinstance(found, (list, tuple)) else [found]:
            if one.untyped_storage().data_ptr() not in places:
                self.most = max(self.most, one.numel())
        return found


def test_replicas_are_compared_in_the_memory_of_a_chunk(monkeypatch) -> None:
    monkeypatch.setattr(replicas, "CHUNK", 100)
    weights = torch.randn(8, 16, 5, 5)
    tensors = [weights, weights.to(memory_format=torch.channels_last), weights.mT, weights[0, 0, 0]]
    with LargestMade() as made:
        sums = sums_of_bits(tensors, CPU)
    assert made.most <= 100
    assert sums[0] == sums[1] == sums[2] == weights.view(torch.int32).sum(dtype=torch.int64)


def test_first_tensor_and_all_ranks_that_differ_are_named() -> None:
    """Four processes, of which two differ in one tensor and one in another as well."""

    class Module(nn.Sequential):
        device = CPU
        automatic_optimization = True

    module: Any = Module(nn.Linear(2, 2), nn.Linear(2, 2))

    def gathered(mine: torch.Tensor) -> torch.Tensor:
        everyone = mine.repeat(4, 1)
        everyone[1, 1] += 1
        everyone[3, 1] += 2
        everyone[3, 2] += 1
        return everyone

    trainer: Any = SimpleNamespace(
        global_step=7,
        is_global_zero=True,
        strategy=SimpleNamespace(all_gather=gathered, model=module),
    )
    callback = Replicas()
    callback.first_sums, callback.is_comparing = {}, True
    with pytest.raises(TrainingError, match=r"0\.bias on rank 1, 3 .*\(2 tensors .*\.\nSome code"):
        callback.compare(trainer, module)
    module.automatic_optimization = False
    with pytest.raises(TrainingError, match=r"as with a GAN, set .*find_unused_parameters=true"):
        callback.compare(trainer, module)
    module[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(TrainingError, match=r"not depend on some .*: 1\.weight, 1\.bias\.\nUse"):
        callback.compare(trainer, module)
