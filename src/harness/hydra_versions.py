"""Hydra 1.3, and at the calls that a project makes what its release candidate 1.4 has renamed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import hydra.utils
from omegaconf import OmegaConf

_whitelist: Any = getattr(hydra.utils, "execution_whitelist", None)  # of 1.4

VERSION_BASE: dict[str, Any] = {} if _whitelist else {"version_base": "1.3"}
REPLACE: dict[str, Any] = {"replace": True} if _whitelist else {}  # of ConfigStore.store


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Let YAML files say ``${name:...}``."""
    register: Any = getattr(OmegaConf, f"register_{'' if _whitelist else 'new_'}resolver")
    register(name, resolver, replace=True)


def building_only(names: Sequence[str]) -> AbstractContextManager[Any]:
    """Let Hydra 1.4 build what matches these names of packages, classes and functions."""
    patterns = [*names, *(f"{name}.*" for name in names)]
    return _whitelist(patterns) if _whitelist else nullcontext()
