"""Which versions the files of this package were tested with, and what a run does with others.

With another version a run says so, goes without what only saves time, and is refused where a name
is gone that its results rest on.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from harness.errors import UserError

if TYPE_CHECKING:  # importing it takes seconds
    import pytorch_lightning as pl

TESTED = {  # the same bounds as in requirements.txt
    "pytorch-lightning": ">=2.6.4,<2.7",
    "torch": ">=2.6,<2.14",
    "torchmetrics": ">=1.6,<1.10",
    "hydra-core": ">=1.3.6,<1.4",
}
FILES = {info.name for info in pkgutil.iter_modules(sys.modules[__package__].__path__)}
NEEDED = sorted(FILES - {"late_imports", "step_overhead", "versions"})  # the first two save time

warn_once = lru_cache(logging.getLogger(__name__).warning)


@lru_cache
def untested() -> list[str]:
    """The packages whose installed version was not tested."""
    return [
        name
        for name, bounds in TESTED.items()
        if not SpecifierSet(bounds).contains(version(name), prereleases=True)
    ]


def check(trainer: pl.Trainer) -> None:
    """Warn of versions that were not tested; call it before the Trainer runs.

    Raises:
        UserError: if one of them lacks a private name that the harness needs.
    """
    if not untested():
        return
    found = " and ".join(f"{name} {version(name)}" for name in untested())
    install = "pip install " + " ".join(f"'{name}{TESTED[name]}'" for name in untested())
    for file in NEEDED:
        for name in private_names(file):
            if error := missing(name, trainer):
                raise UserError(
                    f"{found} lacks {name} ({error}): results would be wrong without it.\n"
                    f"Use {install}, or mend harness/src/harness/upstream/{file}.py."
                )
    if trainer.is_global_zero:
        warn_once(
            f"{found} was not tested, and what only saves time is left out: use {install}, or run "
            "pytest harness/tests/upstream."
        )


def private_names(file: str) -> list[str]:
    """What a file of this package relies on, each as ``module:path``."""
    owners: dict[str, str] = importlib.import_module(f"{__package__}.{file}").PRIVATE
    return [
        f"{owner}{'.' if ':' in owner else ':'}{name}"
        for owner, names in owners.items()
        for name in names.split()
    ]


def missing(name: str, trainer: pl.Trainer) -> str | None:
    """Python's error where upstream does not have a name.

    Args:
        name: as ``module:path``, in which ``()`` calls.
        trainer: what the module ``trainer`` stands for.
    """
    module, _, path = name.partition(":")
    try:
        value: Any = trainer if module == "trainer" else importlib.import_module(module)
        for attribute in path.split("."):
            value = getattr(value, attribute.removesuffix("()"))
            value = value() if attribute.endswith("()") else value
    except (ImportError, AttributeError) as error:
        return str(error)
    return None
