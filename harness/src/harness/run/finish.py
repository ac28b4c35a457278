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
from harness.frozen_files import read_yaml, write_json
from harness.run import loaders, summary
from harness.watch.objective import DEFAULT
from harness.watch.throughput import Throughput

# In results.json where the best checkpoint was lost: what was tested are the last weights.
LAST_WEIGHTS = summary.LAST_WEIGHTS
log = logging.getLogger(__name__)


def finish(trainer: pl.Trainer, cfg: DictConfig, metrics: dict[str, float]) -> None:
    """Write the results, in the first process."""
    if trainer.is_global_zero:
        for name in (name for name, value in metrics.items() if not math.isfinite(value)):
            log.warning("%s is %s.", name, metrics[name])
        log_hyperparameters(trainer, cfg, metrics)
        write_json(Path(cfg.run_dir, "results.json"), json.dumps(metrics, indent=2) + "\n")
        has_test = not loaders.no_test(
            trainer.lightning_module, getattr(trainer, "datamodule", None)
        )
        seen = speed(trainer)
        early = early_stop(trainer)
        record.note(Path(cfg.run_dir), **seen, **best_of(trainer), **early)
        summary.show_end(Path(cfg.run_dir), metrics, seen | early, has_test)


def log_hyperparameters(trainer: pl.Trainer, cfg: DictConfig, metrics: dict[str, float]) -> None:
    """Fill TensorBoard's page of hyper-parameters: what the run was made of and what it reached."""
    shown = OmegaConf.masked_copy(cfg, ["tags", "notes", "seed", "data", "model", "trainer"])
    settings: Any = OmegaConf.to_container(shown)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            # Names of their own: a learning curve must not get a point of the final value.
            reached = {f"final/{k}": v for k, v in metrics.items() if k.startswith("test/")}
            logger.log_hyperparams(settings, reached or {"final/epoch": trainer.current_epoch})
            logger.finalize("success")


def chosen_objective(cfg: DictConfig) -> str | None:
    """The score that the command or a YAML file has chosen; ``None`` where it is the default."""
    typed = Path(cfg.run_dir, "overrides.yaml")
    text = read_yaml(typed) if typed.exists() else "[]"
    # Values stay as they were typed: ${run_dir} is no word of this file.
    words: Any = OmegaConf.to_container(OmegaConf.create(text))
    is_typed = any(word.startswith("objective=") for word in words)
    objective: str | None = cfg.get("objective")
    return objective if is_typed or objective != DEFAULT else None


def scalars(trainer: pl.Trainer) -> dict[str, float]:
    """The last value of every metric that is a number."""
    found = {}
    for name, value in trainer.callback_metrics.items():
        try:
            found[name] = float(value)
        except (RuntimeError, TypeError, ValueError):
            if trainer.is_global_zero:
                log.warning("%s is not one number, and not in results.json.", name)
    return found


def speed(trainer: pl.Trainer) -> dict[str, Any]:
    """What was seen of the run's speed; nothing where it was not watched."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
    for callback in callbacks:
        if isinstance(callback, Throughput) and callback.verdict is not None:
            samples = round(callback.total.samples_per_second, 1)
            return {
                "samples_per_second": samples,
                "verdict": callback.verdict,
                "peak_mib": round(callback.peak_bytes / 2**20),
            }
    return {}


def best_of(trainer: pl.Trainer) -> dict[str, float]:
    """The best value of what best.ckpt is the best of; nothing where none was kept."""
    score = getattr(trainer.checkpoint_callback, "best_model_score", None)
    return {} if score is None else {"best": float(score)}


def early_stop(trainer: pl.Trainer) -> dict[str, str]:
    """Why a training has ended before its last epoch; nothing where it has not."""
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
        return {"stopped_early": f"in epoch {epoch}: {why}"}
    return {}
