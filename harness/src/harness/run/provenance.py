"""Record what decides the bits of a training and needs torch: arithmetic, and checksums of data.

In: the Trainer, as it starts. Out: entries of the run's ``record.json``.
"""

import logging
import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf

from harness import record
from harness.data.checksum import checksum
from harness.exact.global_batches import GlobalBatches
from harness.names import flat
from harness.processes.launcher import global_rank

log = logging.getLogger(__name__)


class Provenance(pl.Callback):
    """Record at each start, in the first process, what a training is made of.

    Args:
        cfg: the run's config.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.run_dir = Path(cfg.run_dir)
        settings: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, ["data", "init"]))
        self.settings = flat(settings)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record versions, arithmetic, and checksums of training data and files."""
        if not trainer.is_global_zero:
            return
        if (self.run_dir / record.NEXT).exists():
            record.begin(self.run_dir)  # a resumed run, which nothing has refused
        record.note_start(self.run_dir, packages=record.packages(), **arithmetic(trainer))
        start = record.read(self.run_dir).get("starts", [{}])[-1]
        if reason := start.get("no_diff"):
            log.warning("What is not committed was not kept: %s.", reason)
        files = {
            key: {"path": text, "crc32": checksum(text)}
            for key, text in self.settings.items()
            if isinstance(text, str) and os.path.isfile(text)
        }
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
        batches = next(c for c in callbacks if isinstance(c, GlobalBatches))
        first = {"files": files, "train": batches.checksums}  # later starts do not replace it
        record.note(self.run_dir, data=first | record.read(self.run_dir).get("data", {}))


def warn_of_changes(checkpoint: str | Path | None) -> None:
    """Warn if code or packages differ from those that trained a checkpoint's run."""
    if checkpoint is None or global_rank() > 0:
        return
    if changes := record.changes(Path(checkpoint).resolve().parent.parent):
        log.warning("%s Today's code and packages are used.", changes)


def arithmetic(trainer: pl.Trainer) -> dict[str, Any]:
    """Return what decides how sums are rounded, in plain values."""
    num_gpus = torch.cuda.device_count() if trainer.strategy.root_device.type == "cuda" else 0
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(num_gpus)],
        "strategy": type(trainer.strategy).__name__,
        "num_processes": trainer.world_size,
        "num_devices": trainer.num_devices,
    }
