"""Which versions the files of this package were tested with, and what a run does with others.

With tested versions nothing but their numbers is looked at. With another one a run says so, goes
without ``step_overhead``, and is refused where a name is gone that its results rest on.
"""

import importlib
import logging
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import pytorch_lightning as pl
from packaging.specifiers import SpecifierSet

from harness.errors import UserError

log = logging.getLogger(__name__)

# The same bounds as in pyproject.toml.
TESTED = {
    "pytorch-lightning": ">=2.6.4,<2.7",
    "torch": ">=2.6,<2.14",
    "torchmetrics": ">=1.6,<1.10",
    "hydra-core": ">=1.3.6,<1.4",
    "tensorboard": ">=2.18,<2.22",
}
NEEDED = (
    "event_files",
    "launchers",
    "logged_means",
    "logged_values",
    "replication",
    "resume_counters",
    "resume_states",
    "signals",
)


def untested() -> dict[str, str]:
    """The installed versions that were not tested, by package."""
    installed = {package: version(package) for package in TESTED}
    return {
        package: found
        for package, found in installed.items()
        if not SpecifierSet(TESTED[package]).contains(found)
    }


def check(trainer: pl.Trainer) -> None:
    """Warn of versions that were not tested; call it before the Trainer runs.

    Raises:
        UserError: if one of them lacks a private name that the harness needs.
    """
    others = untested()
    if not others:
        return
    found = " and ".join(f"{package} {number}" for package, number in others.items())
    install = " ".join(f"'{package}{TESTED[package]}'" for package in others)
    for file in NEEDED:
        if gone := missing(file, trainer):
            raise UserError(
                f"{found}: {', '.join(gone)} is gone, and results would be wrong without it.\n"
                f"Use pip install {install}, or mend src/harness/upstream/{file}.py."
            )
    if trainer.is_global_zero:
        warn_once(
            f"{found} was not tested: use pip install {install}, or run the tests in "
            "tests_harness/upstream first. What only saves time is left out."
        )


@lru_cache
def warn_once(message: str) -> None:
    """Log a warning that this process has not logged before."""
    log.warning(message)


def missing(file: str, trainer: pl.Trainer) -> list[str]:
    """The names in a file's ``PRIVATE`` that upstream does not have."""
    gone = []
    for name in importlib.import_module(f"{__package__}.{file}").PRIVATE:
        try:
            find(name, file, trainer)
        except (ImportError, AttributeError):
            gone.append(name)
    return gone


def find(name: str, file: str, trainer: pl.Trainer) -> Any:
    """What a name in ``PRIVATE`` of a file stands for; the package's docstring says how.

    Raises:
        ImportError, AttributeError: if it is gone.
    """
    root, colon, path = name.rpartition(":")
    module = root if colon else f"{__package__}.{file}"
    found: Any = trainer if root == "trainer" else importlib.import_module(module)
    for attribute in path.split("."):
        found = getattr(found, attribute.removesuffix("()"))
        if attribute.endswith("()"):
            found = found()
    return found
