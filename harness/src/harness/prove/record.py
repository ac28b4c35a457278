"""What a run leaves behind: its weights in checkpoints, its logged values, its own warnings."""

import csv
import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from harness.checkpoints import lookup
from harness.exact.first_batch_check import check_first_batch
from harness.exact.seeded_steps import dropouts
from harness.names import few
from harness.shards import whole

log = logging.getLogger(__name__)

INITIAL = "initial.pt"  # parameters before the first step
FINDINGS = "first_batch.json"
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
        check: compute what several processes would make of the first batches.
    """

    def __init__(
        self, run_dir: str, nudge: float = 0.0, kill_after: int | None = None, check: bool = False
    ) -> None:
        self.run_dir, self.nudge = Path(run_dir), nudge
        self.kill_after, self.check = kill_after, check

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
        strategy: Any = trainer.strategy
        original = strategy.on_train_batch_start

        def called(batch: Any, batch_idx: int) -> None:  # after all hooks of the author
            vars(strategy)["on_train_batch_start"] = original
            original(batch, batch_idx)
            found = check_first_batch(pl_module, trainer.train_dataloader)
            pairs = [(one.kind, one.sentence) for one in found]
            (self.run_dir / FINDINGS).write_text(json.dumps(pairs))

        if self.check:
            vars(strategy)["on_train_batch_start"] = called

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
        findings = run_dir / FINDINGS
        self.findings = json.loads(findings.read_text()) if findings.is_file() else []
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
