import os
import signal
from pathlib import Path

import pytest
import pytorch_lightning as pl

from harness.checkpoints import lookup
from harness.processes.leaving import AgreedExit
from harness.run import train as run


class SignalInLastValidation(pl.Callback):
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_signal_after_the_last_step_is_answered_before_the_test(make_cfg) -> None:
    """No safe point follows in which it could be; the test may take longer than anybody waits."""
    short = ("data=synthetic", "model=mlp", "trainer.max_epochs=1", "strategy=cpu")
    late = f"+callbacks.late._target_={__name__}.SignalInLastValidation"
    cfg = make_cfg(*short, late, "trainer.enable_progress_bar=false")
    with pytest.raises(AgreedExit) as left:
        run.train(cfg)
    assert left.value.code == 128 + signal.SIGTERM
    last = lookup.by_step(Path(cfg.run_dir, "checkpoints"))[-1]
    assert last.name == "step_20.ckpt"
    assert not Path(cfg.run_dir, "results.json").exists()
