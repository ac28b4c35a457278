"""Everything that touches what Lightning, torch and torchmetrics keep private.

Each file says what breaks without it; versions.py lists the private names. For a new version, raise
its bound there and in requirements.txt, and run ``pytest harness/tests/upstream
harness/tests/checkpoints harness/tests/test_same_experiment.py``. Hydra has no part in this.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what comes before the imports of a run takes a module of this package as well
    import pytorch_lightning as pl
    from torch import Tensor


def callbacks_of(trainer: "pl.Trainer") -> "list[pl.Callback]":
    """Return the callbacks in their order, with the type that Lightning 2.6 hides from mypy."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def num_writes(tensor: "Tensor") -> int:
    """Return how often a tensor was written to, as torch counts for autograd."""
    return tensor._version
