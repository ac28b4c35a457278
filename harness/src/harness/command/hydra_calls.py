"""The calls of Hydra that compose a config. What explains mistakes composes as well."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from harness.command import config_files
from harness.machine import num_gpus
from harness.processes.launcher import launcher

RESOLVERS: dict[str, Callable[..., Any]] = {  # ${num_nodes:} and others in YAML files
    "num_gpus_or": lambda default: num_gpus() or default,
    "num_nodes": lambda: launcher().num_nodes,
    "num_started_or": lambda default: (
        default if (known := launcher()).name == "python" else known.num_here
    ),
}
config_files.register()
for _name, _resolver in RESOLVERS.items():
    OmegaConf.register_new_resolver(_name, _resolver, replace=True)


def hydra_compose(
    task: str, overrides: Sequence[str], conf: Path, with_hydra: bool = False
) -> DictConfig:
    """Compose a config from a folder of config files."""
    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        return hydra.compose(task, list(overrides), return_hydra_config=with_hydra)
