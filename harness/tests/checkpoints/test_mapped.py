"""A checkpoint takes memory only for its used tensors, and a resumed run releases it."""

import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from harness.checkpoints.reading import read
from harness.checkpoints.writing import DurableCheckpointIO
from harness.command.compose import compose
from harness.init.settings import read_init
from harness.init.weights import start_from
from tests.faults.resume_sweep import COMMON, train

SIZE = 2**26  # bytes of the optimizer's state


def resident(kind: str) -> int:
    """Bytes of this process's memory: Anon are its own, File are pages of files."""
    found = re.search(rf"^Rss{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found
    return 1024 * int(found[1])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"state": {0: {"exp_avg": torch.ones(SIZE // 4)}}}
    values = {"state_dict": {"w": torch.ones(3)}, "optimizer_states": [state]}
    path = tmp_path / "step_1.ckpt"
    DurableCheckpointIO().save_checkpoint(values, path)
    return path


def test_weights_are_read_without_the_state_of_the_optimizer(checkpoint: Path) -> None:
    before = resident("Anon"), resident("File")
    found = read(checkpoint)
    assert found["state_dict"]["w"].sum() == 3
    assert resident("Anon") - before[0] < SIZE // 4
    assert resident("File") - before[1] < SIZE // 4


def test_what_is_written_to_a_tensor_does_not_reach_its_file(checkpoint: Path) -> None:
    content = checkpoint.read_bytes()
    found = read(checkpoint)
    found["state_dict"]["w"].add_(1)
    found["optimizer_states"][0]["state"][0]["exp_avg"].zero_()
    assert checkpoint.read_bytes() == content
    os.unlink(checkpoint)  # as a run does with its oldest checkpoint
    assert found["state_dict"]["w"].tolist() == [2, 2, 2]


def test_a_file_of_torch_before_1_6_is_read_though_it_cannot_be_mapped(tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.ones(3)}}
    torch.save(state, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert read(tmp_path / "old.ckpt")["state_dict"]["w"].tolist() == [1, 1, 1]


class Maps(pl.Callback):
    """Whether a checkpoint is mapped after the first step."""

    found: list[str] | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        if Maps.found is None:
            maps = Path("/proc/self/maps").read_text().splitlines()
            Maps.found = [line for line in maps if "step_" in line]


def test_a_resumed_run_lets_its_checkpoint_go(tmp_path: Path) -> None:
    """Otherwise the disk space of a removed checkpoint is free only when the run ends."""
    maps = "+callbacks.maps._target_=tests.checkpoints.test_mapped.Maps"
    words = (*COMMON, maps, "trainer.max_epochs=1", "test=false", f"run_dir={tmp_path}")
    train(compose("train", [*words]))
    Maps.found = None
    last = tmp_path / "checkpoints" / "step_3.ckpt"
    train(compose("train", [*words, f"resume={last}"]))
    assert Maps.found == []


def test_a_run_starts_from_weights_with_one_of_them_at_a_time(tmp_path: Path) -> None:
    module: Any = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))  # 16 MiB
    path = tmp_path / "weights.pt"
    torch.save({name: torch.ones_like(value) for name, value in module.state_dict().items()}, path)
    tracemalloc.start()
    try:
        start_from(module, read_init({"path": str(path)}))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * 2**20
    assert all(bool((value == 1).all()) for value in module.parameters())
