"""Train, evaluate or predict, from a run's frozen config to its results.

In: the config, with the run's folder in it. Out: results.json, or the table of predictions, there.
Next: ``build`` makes the objects, the Trainer computes, ``summary`` writes what came out.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf

from harness.checkpoints.lookup import verified
from harness.data import facts
from harness.errors import AgreedExit, UserError
from harness.knobs import trackers
from harness.loggers.rewind import Logs
from harness.names import shown
from harness.processes import dead_ranks
from harness.processes.launcher import global_rank
from harness.run import inputs
from harness.run.build import build, make, seed
from harness.run.mistakes import user_errors
from harness.run.provenance import warn_of_changes
from harness.run.summary import LAST_WEIGHTS, finish, scalars, show, show_start
from harness.run.targets import check_targets

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> None:
    """Fit, test the best checkpoint, and write what came out."""
    trainer, model, data = build(cfg)
    warn_of_changes(cfg.resume)
    if missing := inputs.missing(["train_dataloader"], model, data):
        raise UserError(f"There is nothing to train on: {missing}.")
    with user_errors(cfg), leaving_together():
        show_start(cfg, trainer, model, data)
        if cfg.resume is None:
            if global_rank() == 0:
                Logs(Path(cfg.run_dir)).rewind()  # of a start that reached no checkpoint
            trackers.log_settings(trainer.loggers, cfg)
        seed(cfg)
        trainer.fit(model, data, ckpt_path=cfg.resume, weights_only=True)
        metrics = scalars(trainer)
        best = inputs.best_weights(trainer)
        missing = inputs.missing(inputs.TEST, model, data)
        if cfg.test and missing and trainer.is_global_zero:
            log.warning("No test: %s.", missing)
        if cfg.test and not missing and not trainer.interrupted:
            if best is not None:
                inputs.load_weights(model, best)
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
    warn_of_changes(cfg.checkpoint)
    if missing := inputs.missing(inputs.TEST, model, data):
        raise UserError(f"There is nothing to evaluate: {missing}.")
    inputs.load_weights(model, Path(cfg.checkpoint))  # the command has verified it
    with user_errors(cfg):
        seed(cfg)
        trainer.test(model, data, verbose=False)
    finish(trainer, cfg, scalars(trainer))
    close_process_group()


def predict(cfg: DictConfig) -> None:
    """Write the predictions of a checkpoint to a CSV; what is no table goes beside it."""
    trainer, model, data = build(cfg)
    warn_of_changes(cfg.checkpoint)
    inputs.load_weights(model, Path(cfg.checkpoint))  # the command has verified it
    loaders = ("predict_dataloader", "test_dataloader")
    if all(inputs.missing([name], model, data) for name in loaders):
        raise UserError(
            f"There is nothing to predict: {inputs.missing(loaders, model, data)}.\n"
            "Write: def predict_dataloader(self): return DataLoader(...)"
        )
    inputs.add_prediction_loader(data or model)
    with user_errors(cfg):
        seed(cfg)
        trainer.predict(model, data, return_predictions=False)
    close_process_group()
    for path in (Path(cfg.output), Path(cfg.output).with_suffix(".pt")):
        if trainer.is_global_zero and path.exists():
            show({"predictions": shown(path)})


def load_model(cfg: DictConfig, checkpoint: Path) -> pl.LightningModule:
    """Build a run's module with the weights of a checkpoint, on the CPU, ready for evaluation."""
    with user_errors():
        cfg = OmegaConf.masked_copy(cfg, ["model"])
        check_targets(cfg)
        facts.fill_in(cfg, None, checkpoint.resolve().parent.parent)
        model: pl.LightningModule = make(cfg.model)
    warn_of_changes(checkpoint)
    inputs.load_weights(model, verified(checkpoint))
    return model.eval()


@contextmanager
def leaving_together() -> Iterator[None]:
    """After an agreed exit, end the process group and wait for the other processes."""
    try:
        yield
    except AgreedExit:
        ranks = dead_ranks.release()
        close_process_group()
        for rank in ranks:
            rank.wait()
        raise


def close_process_group() -> None:
    """End the process group together: an open gloo group aborts at exit now and then."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
