"""All code that uses private names of Lightning, torch, torchmetrics and OmegaConf.

Each file's docstring names what breaks without it. ``versions.py`` lists the private names. For a
new version of a package, raise its bound there and in requirements.txt, and run ``pytest
harness/tests/compat harness/tests/checkpoints harness/tests/test_same_experiment.py``.
"""

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # this package must be quick to import
    import pytorch_lightning as pl
    from torch import Tensor

T = TypeVar("T")


def callbacks_of(trainer: "pl.Trainer") -> "list[pl.Callback]":
    """Return the trainer's callbacks in order. Lightning 2.6 hides their type from mypy."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def find_callback(trainer: "pl.Trainer", kind: type[T]) -> T | None:
    """Return the trainer's first callback of a class, or ``None`` if there is none."""
    callbacks: list[Any] = callbacks_of(trainer)
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def num_writes(tensor: "Tensor") -> int:
    """Return how many in-place writes to a tensor torch has counted for autograd."""
    return tensor._version
