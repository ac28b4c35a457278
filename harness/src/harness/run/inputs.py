"""What a stage of a run starts from: its loaders and steps, and the weights of a checkpoint."""

import logging
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.model_helpers import is_overridden

from harness.checkpoints.lookup import link
from harness.checkpoints.reading import read_weights, unreadable
from harness.checkpoints.writing import DurableCheckpointIO
from harness.convert import CheckpointError
from harness.errors import UserError
from harness.processes.launch import global_rank

log = logging.getLogger(__name__)
BEST = "best.ckpt"


def check_training(model: pl.LightningModule, data: pl.LightningDataModule | None) -> None:
    """Refuse to train without a loader.

    Raises:
        UserError: with what to write.
    """
    source = data or model
    if not is_overridden("train_dataloader", source):
        takes = "data=null takes the model's own loaders: " if data is None else ""
        more = "; or choose data=<name>" if data is None else ""
        raise UserError(
            f"{takes}{type(source).__name__} has no train_dataloader.\nWrite one in it{more}."
        )


def missing_for_test(model: pl.LightningModule, data: pl.LightningDataModule | None) -> str | None:
    """Name what a test lacks; ``None`` if it lacks nothing."""
    for owner, method in ((model, "test_step"), (data or model, "test_dataloader")):
        if not is_overridden(method, owner):
            return f"{type(owner).__name__} has no {method}"
    return None


def choose_prediction_loader(
    model: pl.LightningModule, data: pl.LightningDataModule | None
) -> None:
    """Let a module or data module that has no loader to predict on use its test loader.

    Raises:
        UserError: if it has no test loader either.
    """
    source: Any = data or model
    name = type(source).__name__
    if is_overridden("predict_dataloader", source):
        return
    if not is_overridden("test_dataloader", source):
        raise UserError(
            f"{name} has neither a predict_dataloader nor a test_dataloader: there is nothing to "
            f"predict.\nWrite in {name}: def predict_dataloader(self): return DataLoader(...)"
        )
    if global_rank() == 0:
        log.warning("Predicting on the test loader: %s has no predict_dataloader.", name)
    # A partial and no function defined here: spawned processes get it by pickle.
    source.predict_dataloader = partial(test_loader, source)


def test_loader(source: Any) -> Any:
    """The test loader of a module or a data module, whose data sets ``setup`` may make."""
    source.setup("test")
    return source.test_dataloader()


def load_weights(model: pl.LightningModule, path: Path) -> None:
    """Load the weights of a verified checkpoint.

    Raises:
        UserError: if it is none of a training run, or its weights are not the model's.
    """
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


def link_best(trainer: pl.Trainer, best: Path) -> bool:
    """Let ``best.ckpt`` name a run's best checkpoint, if it is whole.

    A damaged one is set aside, which is said: ``last.ckpt`` then stands for the best.

    Returns:
        Whether it is whole, in all processes as the first one has found it.
    """
    reason = None
    if trainer.is_global_zero:
        name = best.with_name(BEST)
        writer = trainer.strategy.checkpoint_io
        found_no_room = isinstance(writer, DurableCheckpointIO) and best in writer.not_written
        absent = "it found no room" if found_no_room else "it is not there any more"
        reason = unreadable(best) if best.is_file() else absent
        if reason is not None:
            log.error("%s is lost: %s.\nThe results are those of the last weights.", best, reason)
            if best.exists():
                best.replace(best.with_name(f"{best.name}.damaged"))
            name.unlink(missing_ok=True)  # it may name another one's weights
        elif best != name:
            link(name, best.name)
        if reason is None and found_no_room:
            log.warning(
                "%s is an earlier one, for the best found no room. The results are those of the "
                "earlier one.",
                best,
            )
    is_whole: bool = trainer.strategy.broadcast(reason is None)
    return is_whole
