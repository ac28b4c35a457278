import os
import signal
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

WRITING_SECONDS = 30  # for which a checkpoint is waited for, at most


class Kill(pl.Callback):
    """Kill the process after the second batch of the second epoch, unless the run was resumed."""

    step = 0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Remember at which step the last checkpoint was written."""
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *given: Any) -> None:
        """Kill as soon as that checkpoint is on disk: a thread writes it."""
        if trainer.current_epoch == 1 and given[-1] == 1 and trainer.ckpt_path is None:
            path = Path(trainer.default_root_dir, "checkpoints", f"step_{self.step}.ckpt")
            end = time.monotonic() + WRITING_SECONDS
            while not path.exists() and time.monotonic() < end:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
