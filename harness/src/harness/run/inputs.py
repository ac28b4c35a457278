"""Check and load what a stage of a run starts from: loaders, steps, weights of a checkpoint."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.model_helpers import is_overridden

from harness.checkpoints.lookup import link
from harness.checkpoints.reading import read_weights, unreadable
from harness.convert import CheckpointError
from harness.errors import UserError
from harness.processes.launcher import global_rank

log = logging.getLogger(__name__)
BEST = "best.ckpt"
TEST = ("test_step", "test_dataloader")


def missing(
    methods: Sequence[str], model: pl.LightningModule, data: pl.LightningDataModule | None
) -> str | None:
    """Name the first of some steps and loaders that nobody has defined."""
    for method in methods:
        owner = model if method.endswith("_step") else data or model
        if not is_overridden(method, owner):
            where = ", and data=null takes its own loaders" if data is None else ""
            return f"{type(owner).__name__} has no {method}{where}"
    return None


def add_prediction_loader(source: Any) -> None:
    """Let a module or data module without a ``predict_dataloader`` predict on its test data."""
    if not is_overridden("predict_dataloader", source):
        name = type(source).__name__
        if global_rank() == 0:
            log.warning("Predicting on the test loader: %s has no predict_dataloader.", name)
        source.predict_dataloader = partial(test_loader, source)


def test_loader(source: Any) -> Any:
    """Return the test loader of a module or data module, whose ``setup`` may make the data."""
    source.setup("test")
    return source.test_dataloader()


def load_weights(model: pl.LightningModule, path: Path) -> None:
    """Load the weights of a verified checkpoint; a UserError if they do not fit the model."""
    try:
        weights = read_weights(path)
    except (OSError, RuntimeError, KeyError, UnpicklingError, CheckpointError) as error:
        raise UserError(f"checkpoint={path} is not a checkpoint of a training run.") from error
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).strip().splitlines()[:2])
        raise UserError(
            f"checkpoint={path} does not fit the model: {reason}\n"
            "Leave out overrides of model.* that change the network."
        ) from error


def best_weights(trainer: pl.Trainer) -> Path | None:
    """Link ``best.ckpt`` to the run's best checkpoint, and return its path if it is whole.

    A damaged one is renamed, with a message. All processes return what the first one has found.
    """
    path = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not path:
        if trainer.is_global_zero and trainer.checkpoint_callback is not None:
            is_empty = trainer.val_dataloaders is not None and not any(trainer.num_val_batches)
            log.warning(
                "There is no best checkpoint: %s. The results are those of the last weights.",
                "the validation loader has no batch"
                if is_empty
                else "nothing was validated, or none is saved",
            )
        return None
    best = Path(path)
    reason = _link_best(best) if trainer.is_global_zero else None
    is_whole = trainer.strategy.broadcast(reason is None)
    return best if is_whole else None


def _link_best(best: Path) -> str | None:
    """Let ``best.ckpt`` name a checkpoint; return why it cannot be read, if so."""
    name = best.with_name(BEST)
    reason = unreadable(best) if best.is_file() else "it is not there any more"
    if reason is None:
        if best != name:
            link(name, best.name)
        return None
    log.error("%s is lost: %s.\nThe results are those of the last weights.", best, reason)
    if best.exists():
        best.replace(best.with_name(f"{best.name}.damaged"))
    name.unlink(missing_ok=True)  # it may name another checkpoint
    return reason
