"""`python train.py strategy=...`, from the config to the results."""

import json
from pathlib import Path

import pytest

from harness.run import tasks as run
from tests_harness.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS


@pytest.mark.parametrize("strategy", ["dp", "ddp2"])
def test_a_run_ends_as_on_one_device(strategy, make_cfg):
    """Augmentation, schedule, uneven last batch and test included."""
    settings = [
        "data=synthetic",
        "model=mlp",
        "trainer.max_epochs=2",
        "watch=none",
        "logger=none",
    ]
    settings += ["trainer.enable_progress_bar=false"]
    results = []
    for words in (["strategy=cpu"], [f"strategy={strategy}", "trainer.devices=2"]):
        cfg = make_cfg(*words, *settings)
        run.train(cfg)
        results.append(json.loads(Path(cfg.run_dir, "results.json").read_text()))
    assert results[0]["test/accuracy"] > 0.5
    assert results[1] == pytest.approx(results[0], abs=1e-4)
