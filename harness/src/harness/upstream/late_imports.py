"""Spares the start of a run what torchmetrics imports for ``Metric.plot`` and for SRMRpy.

Lightning imports torchmetrics, which imports matplotlib and ``scipy.signal`` where they are
installed: half of a start's six seconds, for what most runs never use. Stand-ins take their places
while torchmetrics is imported; whoever uses one later gets the real module from it.
Left out with versions that were not tested. ``harness/tests/upstream/test_late_imports.py`` draws
a plot.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

from harness.upstream import versions

PRIVATE: dict[str, str] = {}


class Late(ModuleType):
    """Stands for a module, and imports it when an attribute of it is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:  # torchmetrics is being imported
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)


@contextmanager
def plot_style(*args: Any, **kwargs: Any) -> Iterator[None]:
    """``matplotlib.style.context``, which torchmetrics decorates functions with."""
    with import_module("matplotlib.style").context(*args, **kwargs):
        yield


# What torchmetrics asks of each of them while it is imported: types for hints, and two functions.
ASKED: dict[str, dict[str, Any]] = {
    "matplotlib": {"colors": SimpleNamespace(Colormap=object), "__path__": []},
    "matplotlib.axes": {"Axes": object},
    "matplotlib.pyplot": {"Figure": object, "style": SimpleNamespace(context=plot_style)},
    "scipy.signal": {"hamming": None},
}


def import_torchmetrics() -> None:
    """Import torchmetrics without matplotlib and ``scipy.signal``."""
    packages = ("matplotlib", "scipy")
    is_late = any(name in sys.modules for name in ("torchmetrics", *ASKED))
    if is_late or versions.untested() or not all(map(find_spec, packages)):
        return
    import torch  # noqa: F401  # inspects all modules, and must not find a stand-in

    stand_ins = {name: Late(name) for name in ASKED}
    for name, module in stand_ins.items():
        vars(module).update(ASKED[name])
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in stand_ins:
            setattr(stand_ins[parent], child, module)
    try:
        import torchmetrics  # noqa: F401
    finally:
        for name, module in stand_ins.items():
            del sys.modules[name]
            for asked in {*vars(module)} - {"__name__", "__spec__"}:
                delattr(module, asked)
