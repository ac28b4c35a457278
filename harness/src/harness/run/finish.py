"""Write what a run has reached: results.json, its record, the loggers' page of settings.

In: the Trainer and the metrics of fit and test. Next: ``summary`` shows them.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
from pytorch_lightning.loggers import TensorBoardLogger

from harness import record
from harness.frozen_files import write_json
from harness.run import summary
from harness.watch.throughput import Throughput

log = logging.getLogger(__name__)


def finish(trainer: pl.Trainer, cfg: DictConfig, metrics: dict[str, float]) -> None:
    """Write the results, in the first process."""
    if not trainer.is_global_zero:
        return
    for name, value in metrics.items():
        if not math.isfinite(value):
            log.warning("%s is %s.", name, value)
    log_hyperparameters(trainer, cfg, metrics)
    run_dir = Path(cfg.run_dir)
    write_json(run_dir / "results.json", json.dumps(metrics, indent=2) + "\n")
    facts: dict[str, Any] = {}
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
    for callback in callbacks:
        if isinstance(callback, Throughput):
            facts |= callback.results()
    if (best := getattr(trainer.checkpoint_callback, "best_model_score", None)) is not None:
        facts["best"] = float(best)
    if reason := early_stop(trainer):
        facts["stopped_early"] = reason
    record.note(run_dir, **facts)
    summary.show_end(run_dir, metrics, facts)


def log_hyperparameters(trainer: pl.Trainer, cfg: DictConfig, metrics: dict[str, float]) -> None:
    """Fill TensorBoard's page of hyper-parameters: what the run was made of and what it reached."""
    chosen = OmegaConf.masked_copy(cfg, ["tags", "notes", "seed", "data", "model", "trainer"])
    settings: Any = OmegaConf.to_container(chosen)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            # Names of their own: a learning curve must not get a point of the final value.
            reached = {f"final/{k}": v for k, v in metrics.items() if k.startswith("test/")}
            logger.log_hyperparams(settings, reached or {"final/epoch": trainer.current_epoch})
            logger.finalize("success")


def scalars(trainer: pl.Trainer) -> dict[str, float]:
    """The last value of every metric that is a number."""
    values = {}
    for name, value in trainer.callback_metrics.items():
        try:
            values[name] = float(value)
        except (RuntimeError, TypeError, ValueError):
            if trainer.is_global_zero:
                log.warning("%s is not one number, and not in results.json.", name)
    return values


def early_stop(trainer: pl.Trainer) -> str | None:
    """Why a training has ended before its last epoch; ``None`` where it has not."""
    for stopper in trainer.early_stopping_callbacks:
        epoch, reason = stopper.stopped_epoch, stopper.stopping_reason
        # A run that was stopped once may have gone on to its last epoch.
        if reason is EarlyStoppingReason.NOT_STOPPED or epoch < trainer.current_epoch - 1:
            continue
        why = f"{stopper.stopping_reason_message}".removesuffix(". Signaling Trainer to stop.")
        if reason is EarlyStoppingReason.PATIENCE_EXHAUSTED:
            why = (
                f"{stopper.monitor} was no better than {float(stopper.best_score):.4g} for "
                f"{stopper.wait_count} validations"
            )
        return f"in epoch {epoch}: {why}"
    return None
