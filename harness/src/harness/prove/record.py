"""What a run leaves behind: its weights in checkpoints, its logged values, its own warnings."""

import csv
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor

from harness.checkpoints import lookup
from harness.exact.seeded_steps import dropouts
from harness.names import few
from harness.shards import whole

log = logging.getLogger(__name__)

INITIAL = "initial.pt"  # parameters before the first step
# In run.log, of the rooms that keep a run the same under every strategy, and of this one.
ROOMS = "checkpoints|data|exact|prove|strategies|upstream"
WARNING = re.compile(
    rf"^\d\S+ \S+ WARNING harness\.(?:{ROOMS})\b\S*: (.*?)(?=^\d{{4}}-|\Z)", re.M | re.S
)


class ShortRun(pl.Callback):
    """Switch dropout off, for two processes draw other masks, and keep the initial parameters.

    Args:
        run_dir: of the run.
        nudge: share by which each initial parameter is moved, as rounding would.
        kill_after: the optimizer step after which the run kills itself.
    """

    def __init__(self, run_dir: str, nudge: float = 0.0, kill_after: int | None = None) -> None:
        self.run_dir, self.nudge, self.kill_after = Path(run_dir), nudge, kill_after

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare the module."""
        if names := list(dropouts(pl_module, switch_off=True)):
            log.warning("Dropout is off in these runs: %s.", few(names, 3))
        with torch.no_grad():
            for parameter in pl_module.parameters() if self.nudge else ():
                parameter.mul_(1 + self.nudge)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep what the first step begins with."""
        initial = {n: whole(p.detach()).cpu() for n, p in pl_module.named_parameters()}
        if trainer.is_global_zero and trainer.ckpt_path is None:
            torch.save(initial, self.run_dir / INITIAL)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        """Die as by ``kill -9``, unless this start goes on with a run that was killed."""
        is_due = self.kill_after is not None and trainer.global_step >= self.kill_after
        if is_due and trainer.ckpt_path is None:
            os.kill(os.getpid(), signal.SIGKILL)


class Record:
    """What is read of a run that has ended, from its folder."""

    def __init__(self, run_dir: Path) -> None:
        self.initial, self.paths = run_dir / INITIAL, lookup.by_step(run_dir / "checkpoints")
        self.warnings = [x.strip() for x in WARNING.findall((run_dir / "run.log").read_text())]
        self.values: dict[str, dict[int, float]] = {}  # that were logged, by name and step
        with (run_dir / "metrics.csv").open() as file:
            for row in csv.DictReader(file):
                step = int(row.pop("step"))
                for name in [name for name in row if row[name] and name != "epoch"]:
                    self.values.setdefault(name, {})[step] = float(row[name])

    def weights(self) -> Iterator[dict[str, Tensor]]:
        """Parameters before the first step, then parameters and buffers after each."""
        yield torch.load(self.initial, weights_only=True)
        for path in self.paths:
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            yield saved["state_dict"]
