"""Record what a run is made of, so that it can be made again: code, packages, data, arithmetic."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf

from harness import code_version, record
from harness.data.checksum import checksum
from harness.data.loaders import leaves
from harness.exact.global_batches import GlobalBatches
from harness.processes.launch import global_rank

log = logging.getLogger(__name__)


class Provenance(pl.Callback):
    """Record at each start, in the first process, what decides the bits of a training.

    Args:
        cfg: the run's config.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.run_dir, self.cfg = Path(cfg.run_dir), cfg
        self.recorded: set[str] = set()  # splits

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record what computes, its code and packages, and which data train."""
        if not trainer.is_global_zero:
            return
        if (self.run_dir / record.NEXT).exists():
            record.begin(self.run_dir)  # the run goes on, and nothing has refused that
        record.note_start(self.run_dir, **arithmetic(trainer), code=code_version.running())
        start = record.read(self.run_dir).get("starts", [{}])[-1]
        if reason := start.get("no_diff"):
            log.warning("What is not committed was not kept: %s.", reason)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
        batches = next(c for c in callbacks if isinstance(c, GlobalBatches))
        self._record_data("files", checksums(self.cfg))
        self._record_data("train", batches.checksums)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record which data validate."""
        self._record_split(trainer, "val", trainer.val_dataloaders)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record which data test."""
        self._record_split(trainer, "test", trainer.test_dataloaders)

    def _record_split(self, trainer: pl.Trainer, split: str, loaders: Any) -> None:
        if trainer.is_global_zero and split not in self.recorded:
            self.recorded.add(split)
            if split not in record.read(self.run_dir).get("data", {}):
                datasets = [getattr(loader, "dataset", None) for loader in leaves(loaders)]
                self._record_data(split, [*map(checksum, datasets)])

    def _record_data(self, name: str, checksums: Any) -> None:
        """Record the checksums with which a run began; later starts keep them."""
        data = record.read(self.run_dir).get("data", {})
        record.note(self.run_dir, data={name: checksums, **data})


def tell_changes(checkpoint: str | Path | None) -> None:
    """Warn where the code or the packages differ from those that trained a checkpoint's run.

    Call it once all is built, as what is not imported is not compared, and before weights are
    loaded, which may refuse what has changed.
    """
    if checkpoint is None or global_rank():
        return
    if changes := code_version.changes(Path(checkpoint).resolve().parent.parent):
        log.warning("%s\nToday's code is used; to be sure, stop, and go back to that.", changes)


def arithmetic(trainer: pl.Trainer) -> dict[str, Any]:
    """What decides how sums are rounded, in plain values."""
    on_gpu = trainer.strategy.root_device.type == "cuda"
    cudnn: Any = torch.backends.cudnn
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": cudnn.version() if on_gpu else None,
        "accelerator": type(trainer.accelerator).__name__,
        "strategy": type(trainer.strategy).__name__,
        "num_processes": trainer.world_size,
        "num_devices": trainer.num_devices,
        "num_nodes": trainer.num_nodes,
        "limits": [trainer.max_epochs, trainer.max_steps],
    }


def checksums(cfg: DictConfig) -> dict[str, dict[str, Any]]:
    """Path and checksum of each file that the settings of data and of first weights name."""
    settings: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, ["data", "init"]))
    return {
        key: {"path": text, "crc32": checksum(text)}
        for key, text in texts(settings)
        if os.path.isfile(text)
    }


def texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of nested settings with its key."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, (dict, list)):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from texts(child, f"{key}.{name}" if key else str(name))
