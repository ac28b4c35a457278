"""Makes a run's progress visible from outside, and its steps slow enough to hit."""

import os
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl


class Trace(pl.Callback):
    """Write each process's id, and a byte per batch, below ``folder``."""

    def __init__(
        self,
        folder: str,
        seconds_per_batch: float = 0.0,
        seconds_per_validation: float = 0.0,
        seconds_per_test: float = 0.0,
    ) -> None:
        self.folder, self.seconds_per_batch = Path(folder), seconds_per_batch
        self.seconds = {"validation": seconds_per_validation, "test": seconds_per_test}

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write the process's id atomically, because the striking test reads it at any moment."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"pid_{trainer.global_rank}"
        part = path.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.replace(path)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        with (self.folder / f"steps_{trainer.global_rank}").open("a") as file:
            file.write(".")
        time.sleep(self.seconds_per_batch)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.be_slow(trainer, "validation")

    def on_test_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.be_slow(trainer, "test")

    def be_slow(self, trainer: pl.Trainer, name: str) -> None:
        self.on_train_start(trainer)  # perhaps in a new process
        (self.folder / f"{name}_{trainer.global_rank}").touch()
        time.sleep(self.seconds[name])
