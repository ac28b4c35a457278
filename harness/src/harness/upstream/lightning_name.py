"""Make ``lightning.pytorch`` and ``lightning.fabric`` other names of the modules that run here.

The distribution ``lightning`` is a copy of ``pytorch_lightning`` and ``lightning_fabric`` whose
classes are others, and most public modules are written for it: a Trainer of the one refuses a
module of the other. Here ``import lightning.pytorch.callbacks`` yields the very module
``pytorch_lightning.callbacks``, whether the copy is installed or not. Uses nothing private.
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
    """Find a module by its name in the copy, and give the one that runs here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return nothing for a module that has no other name, or does not exist."""
        if fullname == "lightning":
            is_installed = PathFinder.find_spec(fullname, path) is not None
            return None if is_installed else ModuleSpec(fullname, self, is_package=True)
        real = find_spec(real_name(fullname)) if real_name(fullname) else None
        if real is None:
            return None
        return ModuleSpec(fullname, self, is_package=real.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        """Put the real module in the place of the empty one; it keeps its own name and spec."""
        if module.__name__ == "lightning":
            vars(module)["__getattr__"] = top_attribute  # an import alone takes no torch
        else:
            sys.modules[module.__name__] = import_module(real_name(module.__name__))


def real_name(name: str) -> str:
    """Return what a module of the copy is called here; nothing for any other module."""
    for other, real in REAL.items():
        if name == other or name.startswith(f"{other}."):
            return real + name.removeprefix(other)
    return ""


def top_attribute(name: str) -> Any:
    """Look up a name of ``lightning`` itself where that is not installed."""
    if f"lightning.{name}" in REAL:
        return import_module(f"lightning.{name}")
    if name == "__version__" or not name.startswith("__"):  # not what inspection asks for
        for package in map(import_module, REAL.values()):
            if hasattr(package, name):
                return getattr(package, name)
    raise AttributeError(f"module 'lightning' has no attribute {name!r}")


def install() -> None:
    """Let both names mean one thing from now on; too late for a copy that was imported."""
    if "lightning.pytorch" not in sys.modules:
        sys.meta_path[:0] = [OtherNames()]
