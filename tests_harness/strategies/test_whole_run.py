"""`python train.py strategy=...`, from the config to the results."""

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
        "callbacks=none",
        "logger=none",
    ]
    settings += ["trainer.enable_progress_bar=false"]
    expected = run.train(make_cfg("strategy=cpu", *settings))
    actual = run.train(make_cfg(f"strategy={strategy}", "trainer.devices=2", *settings))
    assert expected["test/accuracy"] > 0.5
    assert actual == pytest.approx(expected, abs=1e-4)
