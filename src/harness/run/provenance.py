"""What a run notes besides its code, so that it can be made again: packages, data, arithmetic."""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf

from harness import record
from harness.data.identity import identity_of
from harness.data.sharing import leaves
from harness.exact.global_batches import GlobalBatches
from harness.files import write_durably
from harness.run.code_history import FOLDER

PACKAGES = Path(FOLDER, "packages.txt")  # for `pip install -r`
DISTRIBUTION = re.compile(r"(.+)-(.+)\.dist-info")


class Provenance(pl.Callback):
    """Note at each start what decides the bits of a training, in its first process.

    Args:
        cfg: the run's config.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.run_dir, self.cfg = Path(cfg.run_dir), cfg
        self.seen: set[str] = set()  # splits, of which one look is enough

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what computes, the installed packages, and which data train."""
        if not trainer.is_global_zero:
            return
        record.note_start(self.run_dir, **arithmetic(trainer))
        with suppress(OSError):  # a full disk costs the run nothing
            write_durably(self.run_dir / PACKAGES, "".join(installed()).encode())
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
        known = next(c.identities for c in callbacks if isinstance(c, GlobalBatches))
        self.note("files", checksums(self.cfg))
        self.note("train", known)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note which data validate."""
        self.note_split(trainer, "val", trainer.val_dataloaders)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note which data test."""
        self.note_split(trainer, "test", trainer.test_dataloaders)

    def note_split(self, trainer: pl.Trainer, split: str, loaders: Any) -> None:
        """Note the data of an evaluation, the first time."""
        if not trainer.is_global_zero or split in self.seen:
            return
        self.seen.add(split)
        if split not in record.read(self.run_dir).get("data", {}):
            found = [identity_of(getattr(one, "dataset", None)) for one in leaves(loaders)]
            self.note(split, found)

    def note(self, name: str, found: Any) -> None:
        """Note what a run began with; of data that have changed since, a warning tells."""
        known = record.read(self.run_dir).get("data", {})
        if name not in known:
            record.note(self.run_dir, data={**known, name: found})


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
    chosen: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, ["data", "init"]))
    return {
        key: {"path": text, "crc32": identity_of(text)}
        for key, text in texts(chosen)
        if os.path.isfile(text)
    }


def texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of nested settings with its key."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, (dict, list)):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from texts(child, f"{key}.{name}" if key else str(name))


def installed() -> list[str]:
    """A line ``name==version`` for each package, but for those that are folders of this machine.

    The names of their folders say it: to open each of them would take a tenth of a second.
    """
    found: dict[str, str] = {}
    for folder in map(Path, sys.path):
        for path in folder.glob("*.dist-info") if folder.is_dir() else []:
            match, origin = DISTRIBUTION.fullmatch(path.name), path / "direct_url.json"
            source: dict[str, Any] = {}
            with suppress(OSError, ValueError):
                source = json.loads(origin.read_bytes()) if origin.is_file() else {}
            if match and "dir_info" not in source:
                found.setdefault(match[1].replace("_", "-").lower(), match[2])  # as is imported
    return [f"{name}=={version}\n" for name, version in sorted(found.items())]
