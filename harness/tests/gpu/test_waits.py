"""No step makes the host wait for the GPU between two rows of the log."""

import json
from pathlib import Path

import pytest

from tests.examples.test_waits import EXPERIMENTS, FEATURES, SHORT, WAITS
from tests.faults.fork_server import command
from tests.gpu.runs import GPU
from tests.gpu.test_runs import pictures

__all__ = ["pictures"]
pytestmark = pytest.mark.gpu
ONE = {k: v for k, v in (EXPERIMENTS | FEATURES).items() if "trainer.devices=2" not in v}
PRECISIONS = {
    "bf16": ("trainer.precision=bf16-mixed",),
    "tf32": ("tf32=true",),
    "channels_last": ("model=cnn", "channels_last=true"),
    "ddp": ("strategy=ddp",),
    "fsdp": ("strategy=fsdp",),
    "workers": ("data.num_workers=2",),
}


@pytest.mark.parametrize("name", [*ONE, *PRECISIONS])
def test_no_step_waits(name: str, pictures: tuple[str, ...], tmp_path: Path) -> None:
    words = (ONE | PRECISIONS)[name]
    words = words if name in EXPERIMENTS else ("experiment=synthetic", *words)
    words += pictures if name == "images" else ()
    words += (*SHORT, WAITS, f"+callbacks.waits.folder={tmp_path}", f"output_dir={tmp_path}")
    result = command("train.py", *words, *GPU)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "waits_0.json").read_text()) == {}
