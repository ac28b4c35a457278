"""What `python train.py` trains without further words, briefly, and further after that."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness import train
from harness.testing import command

BRIEF = [f"trainer.limit_{split}_batches=2" for split in ("train", "val", "test")]


def test_a_run_trains_and_goes_on(make_cfg, tmp_path: Path) -> None:
    cfg = make_cfg()
    if OmegaConf.missing_keys(cfg.data) or OmegaConf.missing_keys(cfg.model):
        pytest.skip("some of its values are for the command line")
    brief = [*BRIEF, "strategy=cpu", f"output_dir={tmp_path}"]
    train(*brief, "trainer.max_epochs=1")  # here, where all is imported
    further = command("train.py", *brief, "trainer.max_epochs=2", "resume=auto")
    assert further.returncode == 0, further.stderr
    (run,) = tmp_path.glob("*/*/")  # the second command went on in the first one's folder
    assert (run / "results.json").exists()
    assert "epoch" in (run / "metrics.csv").read_text().splitlines()[0]
