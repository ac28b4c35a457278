"""What differs between Hydra 1.3 and 1.4, at the calls that a project makes. No private name.

Hydra 1.3 warns where ``version_base`` is left out, and 1.4 where it is given. OmegaConf 2.4, which
belongs to 1.4, has another name for registering resolvers.
"""

import copyreg
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import hydra.utils
from omegaconf import OmegaConf

_whitelist: Any = getattr(hydra.utils, "execution_whitelist", None)  # of 1.4

VERSION_BASE: dict[str, Any] = {} if _whitelist else {"version_base": "1.3"}
REPLACE: dict[str, Any] = {"replace": True} if _whitelist else {}  # of ConfigStore.store


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Let YAML files say ``${name:...}``."""
    register: Any = getattr(
        OmegaConf, "register_resolver" if _whitelist else "register_new_resolver"
    )
    register(name, resolver, replace=True)


def building_only(names: Sequence[str]) -> AbstractContextManager[Any]:
    """Let Hydra build what matches in the block; 1.3 knows of no such list.

    Args:
        names: of packages, classes and functions.
    """
    if _whitelist is None:
        return nullcontext()
    _let_partials_travel()
    return _whitelist([*names, *(f"{name}.*" for name in names)])  # type: ignore[no-any-return]  # it has no types in 1.3


@cache
def _let_partials_travel() -> None:
    """Pickle a ``_partial_`` as what it calls: ddp_spawn hands modules to its processes so.

    What it calls was allowed when it was made; 1.4 refuses to pickle it, for it would arrive
    without its list.
    """
    made = hydra.utils.instantiate(
        {"_target_": "builtins.dict", "_partial_": True}, _execution_whitelist_=["builtins.dict"]
    )
    copyreg.pickle(
        type(made), lambda one: partial(one.func, *one.args, **one.keywords).__reduce__()
    )
