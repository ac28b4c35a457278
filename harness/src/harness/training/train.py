"""Train, evaluate or predict, from a run's frozen config to its results.

In: the config, with the run's folder in it. Out: results.json, or the table of predictions, there.
Next: ``build`` makes the objects, the Trainer computes, ``summary`` writes what came out.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.utilities.model_helpers import is_overridden

from harness import provenance
from harness.checkpoints.attributes import restore_numbers
from harness.checkpoints.lookup import link, verified
from harness.checkpoints.reading import read_model, unreadable
from harness.checkpoints.safe_point import SafePoint
from harness.compat import callbacks_of
from harness.data import facts
from harness.display import display_path
from harness.distributed import shutdown
from harness.distributed.launcher import global_rank
from harness.errors import AgreedExit, UserError
from harness.features import trackers
from harness.loggers.rewind import Logs
from harness.training.build import build, make, seed, user_errors
from harness.training.check_targets import check_targets
from harness.training.summary import LAST_WEIGHTS, finish, scalars, show, show_start

log = logging.getLogger(__name__)
BEST = "best.ckpt"
TEST = ("test_step", "test_dataloader")


def train(cfg: DictConfig) -> None:
    """Fit, test the best checkpoint, and write what came out."""
    trainer, model, data = build(cfg)
    if reason := missing(["train_dataloader"], model, data):
        raise UserError(f"There is nothing to train on: {reason}.")
    with user_errors(cfg), leaving_together():
        show_start(cfg, trainer, model)
        if cfg.resume is None:
            if global_rank() == 0:
                Logs(Path(cfg.run_dir)).rewind()  # of a start that reached no checkpoint
            trackers.log_settings(trainer.loggers, cfg)
        seed(cfg)
        trainer.fit(model, data, ckpt_path=cfg.resume, weights_only=True)
        metrics = scalars(trainer)
        best = best_weights(trainer)
        reason = missing(TEST, model, data)
        if cfg.test and reason and trainer.is_global_zero:
            log.warning("No test: %s.", reason)
        if cfg.test and not reason and not trainer.interrupted:
            if best is not None:
                load_weights(model, best, trainer.strategy.root_device)
            elif trainer.checkpoint_callback is not None:  # a dry run has none
                metrics[LAST_WEIGHTS] = True
            seed(cfg)
            trainer.test(model, data, verbose=False)
            metrics |= scalars(trainer)
    finish(trainer, cfg, metrics)
    close_process_group()


def evaluate(cfg: DictConfig) -> None:
    """Test a checkpoint and write the metrics."""
    trainer, model, data = build(cfg)
    if reason := missing(TEST, model, data):
        raise UserError(f"There is nothing to evaluate: {reason}.")
    load_weights(model, Path(cfg.checkpoint), trainer.strategy.root_device)  # it is verified
    with user_errors(cfg):
        seed(cfg)
        trainer.test(model, data, verbose=False)
    finish(trainer, cfg, scalars(trainer))
    close_process_group()


def predict(cfg: DictConfig) -> None:
    """Write the predictions of a checkpoint to a CSV; what is no table goes beside it."""
    trainer, model, data = build(cfg)
    load_weights(model, Path(cfg.checkpoint), trainer.strategy.root_device)  # it is verified
    if reason := missing(["predict_dataloader"], model, data):
        raise UserError(
            f"There is nothing to predict: {reason}.\n"
            "Write: def predict_dataloader(self): return DataLoader(...)"
        )
    with user_errors(cfg):
        seed(cfg)
        trainer.predict(model, data, return_predictions=False)
    close_process_group()
    for path in (Path(cfg.output), Path(cfg.output).with_suffix(".pt")):
        if trainer.is_global_zero and path.exists():
            show({"predictions": display_path(path)})


def load_model(cfg: DictConfig, checkpoint: Path) -> pl.LightningModule:
    """Build a run's module with the weights of a checkpoint, on the CPU, ready for evaluation."""
    with user_errors():
        cfg = OmegaConf.masked_copy(cfg, ["model"])
        check_targets(cfg)
        run_dir = checkpoint.resolve().parent.parent
        facts.fill_in(cfg, None, run_dir)
        model: pl.LightningModule = make(cfg.model)
    if changes := provenance.changes(run_dir):
        log.warning("%s", changes)
    load_weights(model, verified(checkpoint))
    return model.eval()


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


def load_weights(model: pl.LightningModule, path: Path, device: Any = "cpu") -> None:
    """Load the weights of a verified checkpoint, and the numbers that training had changed.

    Raises:
        UserError: if they do not fit the model.
    """
    try:
        weights, attributes = read_model(path)
    except (OSError, RuntimeError, KeyError, UnpicklingError) as error:
        raise UserError(
            f"checkpoint={path} is not a checkpoint of a training run.\n"
            "Name the run's folder: checkpoint=<run>."
        ) from error
    try:
        model.load_state_dict(weights, strict=model.strict_loading)
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).strip().splitlines()[:2])
        raise UserError(
            f"checkpoint={path} does not fit the model: {reason}\n"
            "Leave out overrides of model.* that change the network."
        ) from error
    if attributes is not None:
        restore_numbers(model, attributes, device)


def best_weights(trainer: pl.Trainer) -> Path | None:
    """Link ``best.ckpt`` to the run's best checkpoint, and return its path if it is whole.

    A damaged one is renamed, with a message. All processes return what the first one has found.
    """
    path = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if not path:
        is_dry: bool = trainer.fast_dev_run  # type: ignore[attr-defined]  # set untyped
        is_expected = trainer.checkpoint_callback is not None and not is_dry
        if trainer.is_global_zero and is_expected:
            log.warning(
                "There is no best checkpoint: nothing was validated, or none is saved. The results "
                "are those of the last weights."
            )
        return None
    best = Path(path)
    is_whole = trainer.strategy.broadcast(trainer.is_global_zero and link_best(best))
    if are_weights_new(trainer):
        if trainer.is_global_zero:
            log.warning("Hooks have set the weights in on_train_end: the results are of these.")
        return None
    return best if is_whole else None


def are_weights_new(trainer: pl.Trainer) -> bool:
    """Return whether hooks at the end of training, of whichever start, have set other weights."""
    return any(isinstance(c, SafePoint) and c.are_weights_new for c in callbacks_of(trainer))


def link_best(best: Path) -> bool:
    """Let ``best.ckpt`` name a checkpoint, and return whether that can be read."""
    name = best.with_name(BEST)
    reason = unreadable(best) if best.is_file() else "it is not there any more"
    if reason is None:
        if best != name:
            link(name, best.name)
        return True
    log.error("%s is lost: %s.\nThe results are those of the last weights.", best, reason)
    if best.exists():
        best.replace(best.with_name(f"{best.name}.damaged"))
    name.unlink(missing_ok=True)  # it may name another checkpoint
    return False


@contextmanager
def leaving_together() -> Iterator[None]:
    """End the process group after an agreed exit, and wait for the other processes."""
    try:
        yield
    except AgreedExit:
        ranks = shutdown.release_ranks()
        close_process_group()
        for rank in ranks:
            rank.wait()
        raise


def close_process_group() -> None:
    """End the process group together: an open gloo group aborts at exit now and then."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
