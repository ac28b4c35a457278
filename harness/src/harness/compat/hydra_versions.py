"""Call Hydra 1.3 and 1.4, and OmegaConf 2.3 and 2.4, where their calls differ. Imports no torch.

Remove this file when the lower bounds are Hydra 1.4 and OmegaConf 2.4.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import hydra.utils
import omegaconf
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from packaging.version import Version

IS_HYDRA_1_4 = Version(hydra.__version__) >= Version("1.4.dev0")
IS_OMEGACONF_2_4 = Version(omegaconf.__version__) >= Version("2.4.dev0")


def config_folder(conf: Path) -> AbstractContextManager[Any]:
    """Return Hydra's context of the configs in a folder."""
    settings = {} if IS_HYDRA_1_4 else {"version_base": "1.3"}
    return hydra.initialize_config_dir(str(conf), **settings)


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register a resolver, with a cache for each config."""
    register: Any = OmegaConf.register_new_resolver
    if IS_OMEGACONF_2_4:
        register = OmegaConf.register_resolver
    register(name, resolver, replace=True, use_cache=True)


def store_config(name: str, node: dict[str, Any]) -> None:
    """Store a config of the top level, in place of an earlier one of this name."""
    settings: dict[str, Any] = {"replace": True} if IS_HYDRA_1_4 else {}
    ConfigStore.instance().store(name=name, node=node, package="_global_", **settings)


def instantiate(node: Any, allowed: Iterable[str], **given: Any) -> Any:
    """Return ``hydra.utils.instantiate(node, **given)``; Hydra 1.4 runs the allowed names only."""
    settings = {"_execution_whitelist_": [*allowed]} if IS_HYDRA_1_4 else {}
    return hydra.utils.instantiate(node, **settings, **given)
