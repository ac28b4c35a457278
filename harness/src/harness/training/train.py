"""Train, evaluate or predict, from a run's frozen config to its results.

In: the config, which names the run's folder. Out: results.json in that folder, or the table of
predictions. ``build`` makes the objects, the Trainer computes, and ``summary`` writes the results.
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
from harness.compat import find_callback
from harness.data import facts
from harness.display import display_path
from harness.distributed import shutdown
from harness.distributed.launcher import global_rank
from harness.errors import AgreedExit, UserError
from harness.features import trackers
from harness.loggers.rewind import Logs
from harness.training.build import as_user_errors, build, make, seed, training_folder
from harness.training.check_targets import check_targets
from harness.training.summary import LAST_WEIGHTS, finish, scalar_metrics, show, show_start

log = logging.getLogger(__name__)
BEST = "best.ckpt"
TEST = ("test_step", "test_dataloader")  # methods that a test needs


def train(cfg: DictConfig) -> None:
    """Fit, test the best checkpoint, and write the results."""
    trainer, model, data = build(cfg)
    if reason := missing_method(["train_dataloader"], model, data):
        raise UserError(
            f"There is nothing to train on: {reason}.\n"
            "Write: def train_dataloader(self): return DataLoader(...)"
        )
    with as_user_errors(cfg), leave_together():
        show_start(cfg, trainer, model)
        if cfg.resume is None:
            if global_rank() == 0:
                # An earlier start may have logged without saving a checkpoint.
                Logs(Path(cfg.run_dir)).rewind()
            trackers.log_settings(trainer.loggers, cfg)
        seed(cfg)
        trainer.fit(model, data, ckpt_path=cfg.resume, weights_only=True)
        metrics = scalar_metrics(trainer)
        best = best_weights(trainer)
        reason = missing_method(TEST, model, data)
        if cfg.test and reason and trainer.is_global_zero:
            log.warning("The run has no test: %s.", reason)
        if cfg.test and not reason and not trainer.interrupted:
            if best is not None:
                load_weights(model, best, trainer.strategy.root_device)
            elif trainer.checkpoint_callback is not None:  # a dry run has none
                metrics[LAST_WEIGHTS] = True
            seed(cfg)
            trainer.test(model, data, verbose=False)
            metrics |= scalar_metrics(trainer)
    finish(trainer, cfg, metrics)
    close_process_group()


def evaluate(cfg: DictConfig) -> None:
    """Test a checkpoint, and write the metrics."""
    trainer, model, data = build(cfg)
    if reason := missing_method(TEST, model, data):
        raise UserError(f"There is nothing to evaluate: {reason}.")
    load_weights(model, Path(cfg.checkpoint), trainer.strategy.root_device)  # verified
    with as_user_errors(cfg):
        seed(cfg)
        trainer.test(model, data, verbose=False)
    finish(trainer, cfg, scalar_metrics(trainer))
    close_process_group()


def predict(cfg: DictConfig) -> None:
    """Write a checkpoint's predictions to a CSV file, or to a .pt file if they are not a table."""
    trainer, model, data = build(cfg)
    load_weights(model, Path(cfg.checkpoint), trainer.strategy.root_device)  # verified
    if reason := missing_method(["predict_dataloader"], model, data):
        raise UserError(
            f"There is nothing to predict: {reason}.\n"
            "Write: def predict_dataloader(self): return DataLoader(...)"
        )
    with as_user_errors(cfg):
        seed(cfg)
        trainer.predict(model, data, return_predictions=False)
    close_process_group()
    for path in (Path(cfg.output), Path(cfg.output).with_suffix(".pt")):
        if trainer.is_global_zero and path.exists():
            show({"predictions": display_path(path)})


def load_model(cfg: DictConfig, checkpoint: Path) -> pl.LightningModule:
    """Build a run's module on the CPU, in evaluation mode, with the weights of a checkpoint."""
    with as_user_errors():
        cfg = OmegaConf.masked_copy(cfg, ["model"])
        check_targets(cfg)
        run_dir = checkpoint.resolve().parent.parent
        facts.fill_in(cfg, None, run_dir)
        model: pl.LightningModule = make(cfg.model)
    if changes := provenance.changes(run_dir):
        log.warning("%s", changes)
    load_weights(model, verified(checkpoint))
    return model.eval()


def load_data(cfg: DictConfig) -> pl.LightningDataModule | None:
    """Build a run's data module with the facts of its training."""
    with as_user_errors():
        check_targets(OmegaConf.masked_copy(cfg, ["data"]))
        data = None if cfg.data is None else make(cfg.data)
        facts.restore_facts(data, training_folder(cfg))
    return data


def missing_method(
    methods: Sequence[str], model: pl.LightningModule, data: pl.LightningDataModule | None
) -> str | None:
    """Return a text that names the first method that the user has not defined, or ``None``."""
    for method in methods:
        definer = model if method.endswith("_step") else data or model
        if not is_overridden(method, definer):
            note = ", and with data=null the module needs its own loaders" if data is None else ""
            return f"{type(definer).__name__} has no {method}{note}"
    return None


def load_weights(model: pl.LightningModule, path: Path, device: Any = "cpu") -> None:
    """Load the weights of a verified checkpoint, and the number attributes that training changed.

    Raises:
        UserError: the file is no checkpoint of a training run, or does not fit the model.
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
    """Link ``best.ckpt`` to the run's best checkpoint; return the checkpoint's path on all ranks.

    The path is ``None`` if the test must use the last weights: the run saved no best checkpoint,
    the checkpoint is damaged, or hooks set other weights at the end. The run logs the reason.
    """
    path = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if trainer.max_epochs == 0 and trainer.checkpoint_callback is not None:
        # The run only tests the weights of init. evaluate.py and predict.py read them from here.
        path = Path(trainer.default_root_dir, "checkpoints", BEST)
        trainer.save_checkpoint(path, weights_only=True)
    if not path:
        is_dry: bool = trainer.fast_dev_run  # type: ignore[attr-defined]  # set untyped
        is_expected = trainer.checkpoint_callback is not None and not is_dry
        if trainer.is_global_zero and is_expected:
            log.warning(
                "There is no best checkpoint: the run validated nothing, or saved nothing. The "
                "results are those of the last weights."
            )
        return None
    best = Path(path)
    is_whole = trainer.strategy.broadcast(trainer.is_global_zero and link_best(best))
    if are_weights_new(trainer):
        if trainer.is_global_zero:
            log.warning(
                "Hooks have set the weights in on_train_end. The results are those of these "
                "weights."
            )
        return None
    return best if is_whole else None


def are_weights_new(trainer: pl.Trainer) -> bool:
    """Return whether hooks have set other weights at the end of training, in any start."""
    safe_point = find_callback(trainer, SafePoint)
    return safe_point is not None and safe_point.are_weights_new


def link_best(best: Path) -> bool:
    """Link ``best.ckpt`` to a checkpoint, and return whether the checkpoint can be read.

    If the checkpoint is damaged, rename it and log an error.
    """
    best_link = best.with_name(BEST)
    reason = unreadable(best) if best.is_file() else "the file does not exist any more"
    if reason is None:
        if best != best_link:
            link(best_link, best.name)
        return True
    log.error("%s is lost: %s.\nThe results are those of the last weights.", best, reason)
    if best.exists():
        best.replace(best.with_name(f"{best.name}.damaged"))
    best_link.unlink(missing_ok=True)  # the link may name another checkpoint
    return False


@contextmanager
def leave_together() -> Iterator[None]:
    """After an agreed exit, close the process group and wait for the ranks started here."""
    try:
        yield
    except AgreedExit:
        ranks = shutdown.release_ranks()
        close_process_group()
        for rank in ranks:
            rank.wait()
        raise


def close_process_group() -> None:
    """Close the process group on all ranks: an open gloo group sometimes aborts at exit."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
