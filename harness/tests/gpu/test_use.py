"""A run reports its use of the GPU; on the CPU it reports none."""

import json
from pathlib import Path

import pytest

from harness.runs.reading import read
from tests.gpu.runs import GPU, IS_GPU, QUIET, log_of, run

pytestmark = pytest.mark.gpu


def test_a_run_says_how_it_uses_its_gpu(tmp_path: Path) -> None:
    words = ("experiment=synthetic", "trainer.max_epochs=2", "data.num_train=6400", *QUIET, *GPU)
    folder = run(tmp_path, *words)
    record, listed = json.loads((folder / "record.json").read_text()), read(folder)
    assert (listed["gpu_gib"] is not None) == IS_GPU
    assert (" at peak" in log_of(folder)) == IS_GPU
    assert ("gpu/memory_gib" in (folder / "metrics.csv").read_text()) == IS_GPU
    if IS_GPU:
        assert 0 < record["gpu_gib"] < record["gpu_total_gib"]
        assert 0 <= record.get("gpu_busy", 0) <= 1
    else:
        assert "gpu_gib" not in record
