"""Weights of a checkpoint, to test or to predict with: verified, then loaded."""

import logging
from pathlib import Path
from pickle import UnpicklingError

import pytorch_lightning as pl

from harness.checkpoints.lookup import link
from harness.checkpoints.reading import read, unreadable
from harness.checkpoints.writing import DurableCheckpointIO
from harness.errors import UserError

log = logging.getLogger(__name__)
BEST = "best.ckpt"


def load_weights(model: pl.LightningModule, path: Path) -> None:
    """Load the weights of a checkpoint that was verified into a model.

    Raises:
        UserError: if it is none of a training run, or its weights are not the model's.
    """
    try:
        weights = read(path)["state_dict"]
    except (OSError, RuntimeError, KeyError, UnpicklingError) as error:
        raise UserError(f"checkpoint={path} is not a checkpoint of a training run.") from error
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        reason = str(error).strip().splitlines()
        raise UserError(
            f"checkpoint={path} does not fit the model: {' '.join(reason[:2])}\n"
            "Leave out overrides of model.* that change the network."
        ) from error


def link_best(trainer: pl.Trainer, best: Path) -> bool:
    """Let ``best.ckpt`` name a run's best checkpoint, if it is whole.

    Otherwise that is said, and it is set aside: what looks for the best checkpoint of a run then
    finds ``last.ckpt``.

    Returns:
        Whether it is whole, in all processes as the first one has found it.
    """
    reason = None
    if trainer.is_global_zero:
        name = best.with_name(BEST)
        writer = trainer.strategy.checkpoint_io
        has_no_room = isinstance(writer, DurableCheckpointIO) and best in writer.not_written
        absent = "it found no room" if has_no_room else "it is not there any more"
        reason = unreadable(best) if best.is_file() else absent
        if reason is not None:
            log.error("%s is lost: %s.\nThe results are those of the last weights.", best, reason)
            if best.exists():
                best.replace(best.with_name(f"{best.name}.damaged"))
            name.unlink(missing_ok=True)  # it may name another one's weights
        elif best != name:
            link(name, best.name)
        if reason is None and has_no_room:
            log.warning(
                "%s is an earlier one, for the best found no room. The results are those of the "
                "earlier one.",
                best,
            )
    whole: bool = trainer.strategy.broadcast(reason is None)
    return whole
