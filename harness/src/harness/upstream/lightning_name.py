"""Makes ``lightning.pytorch`` and ``lightning.fabric`` other names of the modules that run here.

The distribution ``lightning`` is a copy of ``pytorch_lightning`` and ``lightning_fabric`` under
another name: its classes are others, and a Trainer of the one refuses a module of the other. Most
public modules are written for the copy. An import of ``lightning.pytorch.callbacks`` here yields
the very module ``pytorch_lightning.callbacks``, whether the copy is installed or not. Without it
``lightning`` itself is a module with the names that its own has; with it, what has no other name,
such as ``lightning.data``, is its own. Uses nothing private.
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
TOP = {  # what `lightning` has, and the module that has it
    "Callback": "pytorch_lightning",
    "Fabric": "lightning_fabric",
    "LightningDataModule": "pytorch_lightning",
    "LightningModule": "pytorch_lightning",
    "Trainer": "pytorch_lightning",
    "__version__": "pytorch_lightning",
    "seed_everything": "lightning_fabric",
}


class OtherName(MetaPathFinder, Loader):
    """Find a module under its name in the copy, and give the one that runs here."""

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
        real = real_name(module.__name__)
        assert real is not None, "find_spec has found it"
        sys.modules[module.__name__] = import_module(real)


class Top(MetaPathFinder, Loader):
    """Find ``lightning`` where it is not installed; last of all finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Nothing for any other name."""
        return ModuleSpec(fullname, self, is_package=True) if fullname == "lightning" else None

    def exec_module(self, module: ModuleType) -> None:
        """Fill it when its names are used: an import alone takes no torch."""

        def get(name: str) -> Any:
            if name in TOP:
                value = getattr(import_module(TOP[name]), name)
            elif f"lightning.{name}" in REAL:
                value = import_module(f"lightning.{name}")
            else:
                raise AttributeError(f"module 'lightning' has no attribute {name!r}")
            setattr(module, name, value)
            return value

        names = vars(module)
        names["__all__"] = list(TOP)
        names["__getattr__"] = get


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
