"""What `python train.py` trains without further words, briefly, and further after that."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.testing import command

BRIEF = [f"trainer.limit_{split}_batches=2" for split in ("train", "val", "test")]


def test_a_run_trains_and_goes_on(make_cfg, tmp_path: Path) -> None:
    cfg = make_cfg()
    if OmegaConf.missing_keys(cfg.data) or OmegaConf.missing_keys(cfg.model):
        pytest.skip("some of its values are for the command line")
    brief = [*BRIEF, "strategy=cpu", f"output_dir={tmp_path}"]
    for overrides in (["trainer.max_epochs=1"], ["trainer.max_epochs=2", "resume=auto"]):
        trained = command("train.py", *brief, *overrides)
        assert trained.returncode == 0, trained.stderr
    (run,) = tmp_path.glob("*/*/")  # the second command went on in the first one's folder
    assert (run / "results.json").exists()
    assert "epoch" in (run / "metrics.csv").read_text().splitlines()[0]
