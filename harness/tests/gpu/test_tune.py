"""tune on a GPU: sizes grow until memory ends, which is free again afterwards."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.tune import search, trials
from harness.tune.__main__ import main
from tests.gpu.runs import GPU, IS_GPU, TINY, run
from tests.strategy_runs import write_conf

pytestmark = pytest.mark.gpu
DATA = "_target_: tests.tune.modules.Measures\nbatch_size: 16\nnum_workers: 0\nseed: 0\n"
NUM_BYTES = 2**30


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Let this process have a GiB, and none of what earlier tests hold."""
    if IS_GPU:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(NUM_BYTES / total)
    yield
    if IS_GPU:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_sizes_grow_until_memory_ends(
    tmp_path: Path,
    little_memory: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(trials, "SECONDS", 0.3)
    monkeypatch.setattr(search, "NUM_STEPS", 1)
    name = "HungryNet" if IS_GPU else "LargeNet"
    model = f"_target_: tests.tune.modules.{name}\nlr: 0.1\n"
    words = write_conf(tmp_path, model=model, data=f"{DATA}num_train: 4000\n")
    assert main([*words, *GPU]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^ +\d+  does not fit in memory$", said, re.MULTILINE), said
    assert all(len(line) <= 80 for line in said.splitlines())
    if IS_GPU:
        assert re.search(r"memory of [\d.]+ GiB$", said, re.MULTILINE)
        assert re.search(r"^ +128 .* 0\.[56] GiB$", said, re.MULTILINE), said
        gc.collect()
        assert torch.cuda.memory_allocated() < NUM_BYTES / 10


def test_the_line_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trials, "SECONDS", 0.3)
    assert main([*TINY, *GPU]) == 0
    run(tmp_path, *TINY, *GPU, *capsys.readouterr().out.splitlines()[-1].split())
