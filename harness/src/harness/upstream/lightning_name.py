"""Makes ``lightning.pytorch`` and ``lightning.fabric`` other names of the modules that run here.

The distribution ``lightning`` is a copy of ``pytorch_lightning`` and ``lightning_fabric`` whose
classes are others, and most public modules are written for it: a Trainer of the one refuses a
module of the other. Here ``import lightning.pytorch.callbacks`` yields the very module
``pytorch_lightning.callbacks``, whether the copy is installed or not. Uses nothing private.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PRIVATE: dict[str, str] = {}
REAL = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}


class OtherName(MetaPathFinder, Loader):
    """Finds a module under its name in the copy, and gives the one that runs here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Nothing for a module that has no other name, or does not exist."""
        real = real_name(fullname)
        if real is None or (found := find_spec(real)) is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Put the real module in the place of the empty one; it keeps its own name and spec."""
        sys.modules[module.__name__] = import_module(str(real_name(module.__name__)))


class Top(MetaPathFinder, Loader):
    """Finds ``lightning`` itself where it is not installed; the last of all finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Nothing for any other name."""
        return ModuleSpec(fullname, self, is_package=True) if fullname == "lightning" else None

    def exec_module(self, module: ModuleType) -> None:
        """Let its names be looked up when they are used: an import alone takes no torch."""

        def get(name: str) -> Any:
            if f"lightning.{name}" in REAL:
                return import_module(f"lightning.{name}")
            if name == "__version__" or not name.startswith("__"):  # not what inspection asks for
                for package in map(import_module, REAL.values()):
                    if hasattr(package, name):
                        return getattr(package, name)
            raise AttributeError(f"module 'lightning' has no attribute {name!r}")

        vars(module)["__getattr__"] = get


def real_name(name: str) -> str | None:
    """What a module of the copy is called here; ``None`` for any other module."""
    for other, real in REAL.items():
        if name == other or name.startswith(f"{other}."):
            return real + name.removeprefix(other)
    return None


def install() -> None:
    """Let the names mean one thing from now on, once; too late for a copy that was imported."""
    if "lightning.pytorch" not in sys.modules:
        sys.meta_path[:0] = [OtherName()]
        sys.meta_path.append(Top())


def is_of_copy(value: Any) -> bool:
    """Whether an object's class derives from one of a copy that was imported before."""
    return any(real_name(base.__module__) for base in type(value).__mro__)
