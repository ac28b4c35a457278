"""The experiment that a tuning command names: composed as ``train.py`` would, and never trained."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import OmegaConf

from harness.command import gpus, validate
from harness.command.compose import compose_command
from harness.machine import num_gpus
from harness.run import log_file as run_log
from harness.run import tasks as run
from harness.run.mistakes import user_errors

Parts = tuple[pl.Trainer, pl.LightningModule, Any]


def composed(overrides: list[str], conf: str | Path = "conf") -> Any:
    """The checked config of a training command.

    Raises:
        UserError: with what to type instead.
    """
    command = compose_command("train", overrides, conf)
    validate.check(command)
    return OmegaConf.create(OmegaConf.to_container(command.cfg, resolve=True))


def num_processes(trainer: Any) -> int:
    """Processes that share a batch, as the config's strategy starts them."""
    strategy = _strategy(trainer)
    if strategy == "DDP2Strategy":
        return int(trainer.num_nodes)
    is_ddp = strategy == "DDPStrategy" or strategy.startswith("ddp")
    return _num_devices(trainer.devices) * int(trainer.num_nodes) if is_ddp else 1


def _strategy(trainer: Any) -> str:
    target = OmegaConf.select(trainer, "strategy._target_", default=trainer.strategy)
    return str(target).rpartition(".")[2]


def _num_devices(devices: Any) -> int:
    if OmegaConf.is_list(devices):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([index for index in devices.split(",") if index])
    return max(1, num_gpus()) if devices in ("auto", -1, "-1") else int(devices)


@contextmanager
def one_process(cfg: Any) -> Iterator[Parts]:
    """Build one process of an experiment, which leaves nothing: no folder, no logs, no pictures.

    It has one device, or under dp and ddp2 those of its node.
    """
    cfg.callbacks, cfg.logger, cfg.checkpoint, cfg.resume = {}, {}, None, None
    cfg.trainer.enable_progress_bar, cfg.trainer.num_nodes = False, 1
    cfg.data.num_workers = 0 if cfg.data.num_workers == "auto" else cfg.data.num_workers
    if _strategy(cfg.trainer) == "DDP2Strategy":
        kept = ("modules", "whole_inputs", "scalar_outputs")
        dp = {key: cfg.trainer.strategy[key] for key in kept if key in cfg.trainer.strategy}
        cfg.trainer.strategy = {
            "_target_": "harness.strategies.dp.DataParallelStrategy",
            **dp,
        }
    elif _strategy(cfg.trainer) != "DataParallelStrategy":
        devices = cfg.trainer.devices
        is_list = OmegaConf.is_list(devices)
        cfg.trainer.strategy, cfg.trainer.devices = "auto", [devices[0]] if is_list else 1
    gpus.choose(cfg)
    with tempfile.TemporaryDirectory() as folder, user_errors():
        cfg.run_dir = folder
        try:
            yield run.build(cfg)
        finally:
            run_log.stop()
