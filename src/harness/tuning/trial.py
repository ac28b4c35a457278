"""The experiment that a tuning command names: composed as ``train.py`` would, and never trained."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import OmegaConf
from pytorch_lightning.strategies import DDPStrategy

from harness.command import gpus, validate
from harness.command.compose import compose_command
from harness.machine import num_gpus
from harness.run import log_file as run_log
from harness.run import tasks as run
from harness.run.mistakes import user_errors
from harness.strategies.ddp2 import DDP2Strategy
from harness.strategies.dp import DataParallelStrategy
from harness.strategies.launchable import device_indices

Experiment = tuple[pl.Trainer, pl.LightningModule, Any]


def composed(overrides: list[str], conf: str | Path = "conf") -> Any:
    """The checked config of a training command.

    Raises:
        UserError: with what to type instead.
    """
    command = compose_command("train", overrides, conf)
    validate.check(command)
    return OmegaConf.create(OmegaConf.to_container(command.cfg, resolve=True))


def num_processes(trainer: Any) -> int:
    """Processes that share a batch under the config's strategy."""
    strategy = _strategy(trainer)
    if strategy == DDP2Strategy.__name__:
        return int(trainer.num_nodes)
    is_ddp = strategy == DDPStrategy.__name__ or strategy.startswith("ddp")
    return _num_devices(trainer.devices) * int(trainer.num_nodes) if is_ddp else 1


def _strategy(trainer: Any) -> str:
    target = OmegaConf.select(trainer, "strategy._target_", default=trainer.strategy)
    return str(target).rpartition(".")[2]


def _num_devices(devices: Any) -> int:
    indices = device_indices(devices)
    if indices is not None:
        return len(indices)
    return max(1, num_gpus()) if devices in ("auto", -1, "-1") else int(devices)


@contextmanager
def one_process(cfg: Any) -> Iterator[Experiment]:
    """Build one process of an experiment that writes no folder, no logs and no pictures.

    It has one device, or under dp and ddp2 the devices of its node.
    """
    cfg.callbacks, cfg.logger, cfg.checkpoint, cfg.resume = {}, {}, None, None
    cfg.trainer.enable_progress_bar, cfg.trainer.num_nodes = False, 1
    cfg.data.num_workers = 0 if cfg.data.num_workers == "auto" else cfg.data.num_workers
    if _strategy(cfg.trainer) == DDP2Strategy.__name__:
        kept = ("modules", "whole_inputs", "scalar_outputs")
        dp = {key: cfg.trainer.strategy[key] for key in kept if key in cfg.trainer.strategy}
        dp["_target_"] = f"{DataParallelStrategy.__module__}.{DataParallelStrategy.__name__}"
        cfg.trainer.strategy = dp
    elif _strategy(cfg.trainer) != DataParallelStrategy.__name__:
        indices = device_indices(cfg.trainer.devices)
        cfg.trainer.strategy, cfg.trainer.devices = "auto", indices[:1] if indices else 1
    gpus.choose(cfg)
    with tempfile.TemporaryDirectory() as folder, user_errors(cfg):
        cfg.run_dir = folder
        try:
            yield run.build(cfg)
        finally:
            run_log.stop()
