"""Objects of what a config names; what the data teaches is filled in between."""

import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig, OmegaConf

from harness.allowed import instantiate
from harness.data import facts
from harness.frozen_files import read_yaml, write_json
from harness.init.freezing import Freezing
from harness.init.settings import settings
from harness.init.weights import start_from
from harness.processes.launch import global_rank
from harness.run import screen

CONFIG = "config.yaml"


def make(node: DictConfig) -> Any:
    """Build one object of plain values."""
    return instantiate(node, _convert_="all")


def made_data(cfg: DictConfig) -> Any:
    """Build the data module, and fill in what the config takes from it.

    A run that begins keeps what its data taught; what uses a run afterwards gets it back.
    """
    data = None if cfg.data is None else make(cfg.data)
    begins = "resume" in cfg and cfg.resume is None
    run_dir = training_folder(cfg)
    if not begins:
        facts.hand_over(data, run_dir)
        if "resume" not in cfg and global_rank() == 0 and (run_dir / CONFIG).is_file():
            facts.tell_other_split(cfg, OmegaConf.create(read_yaml(run_dir / CONFIG)))
    found = facts.fill_in(cfg, data, None if begins else run_dir)
    if begins and found and global_rank() == 0:
        write_json(run_dir / facts.FILE, json.dumps(found, indent=2) + "\n")
    return data


def made_model(cfg: DictConfig) -> tuple[Any, list[pl.Callback]]:
    """Build the module as training begins with it, and the callback that keeps parts frozen.

    A run that begins loads the weights that it starts from. What uses a run afterwards, or goes on
    with it, has its checkpoints.
    """
    model = make(cfg.model)
    if "resume" not in cfg or not isinstance(model, pl.LightningModule):
        return model, []
    init = settings(OmegaConf.to_container(cfg.init) if cfg.get("init") is not None else None)
    if init.path is not None and cfg.resume is None:
        started = start_from(model, init)
        if global_rank() == 0:
            screen.show_weights(started)
    freezing = [Freezing(init.freeze, init.unfreeze_at_epoch)] if init.freeze else []
    for callback in freezing:
        callback.freeze(model)
    return model, [*freezing]


def training_folder(cfg: DictConfig) -> Path:
    """The folder of the run that trains, or that has written the checkpoint."""
    return Path(cfg.run_dir) if "resume" in cfg else Path(cfg.checkpoint).resolve().parent.parent
