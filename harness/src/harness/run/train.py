"""Train, evaluate or predict, from a run's frozen config to its results.

In: the config, with the run's folder in it. Out: results.json, or the table of predictions, there.
Next: ``build`` makes the objects, the Trainer computes, ``finish`` writes what came out.
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
from harness.errors import UserError
from harness.knobs import trackers
from harness.loggers.rewind import Logs
from harness.places import shown
from harness.processes.launch import global_rank
from harness.processes.leaving import AgreedExit
from harness.run import inputs, summary
from harness.run.build import build, make, seed
from harness.run.finish import finish, scalars
from harness.run.mistakes import user_errors
from harness.run.provenance import tell_changes
from harness.run.summary import LAST_WEIGHTS
from harness.run.targets import check_targets
from harness.upstream import processes

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> None:
    """Fit, test the best checkpoint, and write what came out."""
    trainer, model, data = build(cfg)
    tell_changes(cfg.resume)
    inputs.check_training(model, data)
    with user_errors(cfg), leaving_together(trainer):
        summary.show_start(trainer, model, data, cfg.resume, cfg.tags, cfg.notes)
        if cfg.resume is None:
            if global_rank() == 0:
                Logs(Path(cfg.run_dir)).rewind()  # of a start that came to no checkpoint
            trackers.log_settings(trainer.loggers, cfg)
        seed(cfg)
        trainer.fit(model, data, ckpt_path=cfg.resume, weights_only=True)
        metrics = scalars(trainer)
        # A run without checkpoints, such as fast_dev_run, tests the weights that it has.
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        has_best = bool(best) and inputs.link_best(trainer, Path(best))
        missing = inputs.missing_for_test(model, data)
        if cfg.test and missing and trainer.is_global_zero:
            log.warning("No test: %s.", missing)
        if cfg.test and not missing and not trainer.interrupted:
            if has_best:
                inputs.load_weights(model, Path(best))
            elif best:
                metrics[LAST_WEIGHTS] = True
            seed(cfg)
            trainer.test(model, data, verbose=False)
            metrics |= scalars(trainer)
    finish(trainer, cfg, metrics)
    close_process_group()


def evaluate(cfg: DictConfig) -> None:
    """Test a checkpoint and write the metrics."""
    trainer, model, data = build(cfg)
    tell_changes(cfg.checkpoint)
    if missing := inputs.missing_for_test(model, data):
        raise UserError(f"There is nothing to evaluate: {missing}. Write one.")
    inputs.load_weights(model, Path(cfg.checkpoint))  # the command has verified it
    with user_errors(cfg):
        seed(cfg)
        trainer.test(model, data, verbose=False)
    finish(trainer, cfg, scalars(trainer))
    close_process_group()


def predict(cfg: DictConfig) -> None:
    """Write the predictions of a checkpoint to a CSV; what is no table goes beside it."""
    trainer, model, data = build(cfg)
    tell_changes(cfg.checkpoint)
    inputs.load_weights(model, Path(cfg.checkpoint))  # the command has verified it
    inputs.choose_prediction_loader(model, data)
    outputs = [Path(cfg.output), Path(cfg.output).with_suffix(".pt")]
    before = [path.stat() if path.exists() else None for path in outputs]
    with user_errors(cfg):
        seed(cfg)
        trainer.predict(model, data, return_predictions=False)
    close_process_group()
    for path, old in zip(outputs, before, strict=True):
        if trainer.is_global_zero and path.exists() and path.stat() != old:
            summary.show({"predictions": shown(path)})


def load_model(cfg: DictConfig, checkpoint: Path) -> pl.LightningModule:
    """Build a run's module with the weights of a checkpoint, on the CPU, ready for evaluation."""
    with user_errors():
        cfg = OmegaConf.masked_copy(cfg, ["model"])
        check_targets(cfg)
        facts.fill_in(cfg, None, checkpoint.resolve().parent.parent)
        model: pl.LightningModule = make(cfg.model)
    tell_changes(checkpoint)
    inputs.load_weights(model, verified(checkpoint))
    return model.eval()


@contextmanager
def leaving_together(trainer: pl.Trainer) -> Iterator[None]:
    """Where all processes have agreed to leave, end the process group and wait for the others."""
    try:
        yield
    except AgreedExit:
        close_process_group()
        for process in processes.started_processes(trainer):
            process.wait()
        raise


def close_process_group() -> None:
    """End the process group together: a gloo group left open aborts at exit now and then."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
