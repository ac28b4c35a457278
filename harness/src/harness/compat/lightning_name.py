"""Make ``lightning.pytorch`` and ``lightning.fabric`` aliases of the packages in use.

The distribution ``lightning`` is a copy of ``pytorch_lightning`` and ``lightning_fabric`` with
classes of its own. Most public modules are written for it, and a Trainer of one package refuses a
module of the other. With this file, ``import lightning.pytorch.callbacks`` returns the module
``pytorch_lightning.callbacks``, whether ``lightning`` is installed or not. It uses no private name.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

REAL = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


class OtherNames(MetaPathFinder, Loader):
    """Import a module of ``lightning`` as the module of the same name in ``REAL``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an alias; None for another name, or if the module does not exist."""
        if fullname == "lightning":
            is_installed = PathFinder.find_spec(fullname, path) is not None
            return None if is_installed else ModuleSpec(fullname, self, is_package=True)
        real = find_spec(real_name(fullname)) if real_name(fullname) else None
        if real is None:
            return None
        return ModuleSpec(fullname, self, is_package=real.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module by the real one, which keeps its own name and spec."""
        if module.__name__ == "lightning":
            vars(module)["__getattr__"] = top_attribute  # imports torch only when used
        else:
            sys.modules[module.__name__] = import_module(real_name(module.__name__))


def real_name(name: str) -> str:
    """Return the real name of an alias; "" for any other module."""
    for alias, real in REAL.items():
        if name == alias or name.startswith(f"{alias}."):
            return real + name.removeprefix(alias)
    return ""


def top_attribute(name: str) -> Any:
    """Return an attribute of ``lightning`` itself, for a process in which it is not installed."""
    if f"lightning.{name}" in REAL:
        return import_module(f"lightning.{name}")
    if name == "__version__" or not name.startswith("__"):  # no other dunder
        for package in map(import_module, REAL.values()):
            if hasattr(package, name):
                return getattr(package, name)
    raise AttributeError(f"module 'lightning' has no attribute {name!r}")


def install() -> None:
    """Install the aliases, unless ``lightning.pytorch`` is imported already."""
    if "lightning.pytorch" not in sys.modules:
        sys.meta_path[:0] = [OtherNames()]
