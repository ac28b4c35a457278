"""Hydra's composition, the same for the command line, the tests and a notebook."""

from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from harness.command import run_folder
from harness.machine import num_gpus

CONF = Path(__file__).parents[3] / "conf"
GROUPS = {path.name for path in CONF.iterdir() if path.is_dir()}

OmegaConf.register_new_resolver("num_gpus_or", lambda default: num_gpus() or default, replace=True)


def compose(config_name: str, overrides: list[str]) -> DictConfig:
    """Compose a config as the command line would, inside and outside of a Hydra application."""
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(config_name, overrides)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(config_name, overrides)


def store_training_config(file: Path | None) -> None:
    """Give Hydra, as config ``run``, what a run has trained on: see conf/evaluate.yaml.

    Only what the weights depend on is taken; devices, callbacks and loggers are those of the
    new command. Without a file, data and model stay empty.
    """
    node: dict[str, Any] = {"data": {}, "model": {}}
    if file is not None:
        trained = run_folder.resolved(run_folder.load_config(file.parent))
        node = {key: trained.get(key) for key in ("data", "model", "seed", "name")}
        node["trainer"] = {"precision": trained.trainer.precision}
    ConfigStore.instance().store(name="run", node=node, package="_global_")


store_training_config(None)
