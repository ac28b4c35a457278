"""A run, from its frozen config to its results: train, evaluate or predict.

The only place that knows both the config and the Trainer; everything that is built here takes
plain values.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher

from harness.checkpoints.safe_point import SafePoint
from harness.checkpoints.writing import DurableCheckpointIO
from harness.command import run_folder
from harness.errors import UserError
from harness.exact.evaluation import ExactEvaluation
from harness.exact.seeded_steps import SeededSteps
from harness.exact.sync_batch_norm import SyncBatchNormAnywhere
from harness.exact.uneven_batches import UnevenBatches
from harness.files import write_durably
from harness.loggers.prediction_table import PredictionTable
from harness.loggers.rewind import rewind_logs
from harness.processes import spawned
from harness.processes.dead_ranks import DeadRanks
from harness.processes.leaving import AgreedExit
from harness.processes.starting import observe_start
from harness.run import screen as summary
from harness.run.log_file import RunLog
from harness.run.mistakes import user_errors
from harness.run.targets import check_targets
from harness.upstream.idle_hooks import skip_idle_hooks
from harness.watch.replicas import Replicas
from harness.watch.throughput import Throughput

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> dict[str, float]:
    """Fit, test the best checkpoint, and return the metrics."""
    trainer, model, data = build(cfg)
    summary.show_start(trainer, model, data)
    if cfg.resume is None and run_folder.global_rank() == 0:
        rewind_logs(Path(cfg.run_dir), 0)  # of a start that came to no checkpoint
    with user_errors(), leaving_together(trainer):
        trainer.fit(model, data, ckpt_path=cfg.resume, weights_only=True)
        metrics = scalars(trainer)
        if cfg.test and not trainer.interrupted:
            # A run without checkpoints, such as fast_dev_run, tests the weights that it has.
            if best := getattr(trainer.checkpoint_callback, "best_model_path", ""):
                load_weights(model, Path(best))
            trainer.test(model, data, verbose=False)
            metrics |= scalars(trainer)
    finish(trainer, cfg, metrics)
    return metrics


def evaluate(cfg: DictConfig) -> dict[str, float]:
    """Test a checkpoint and return the metrics."""
    trainer, model, data = build(cfg)
    load_weights(model, Path(cfg.checkpoint))
    with user_errors():
        trainer.test(model, data, verbose=False)
    metrics = scalars(trainer)
    finish(trainer, cfg, metrics)
    return metrics


def predict(cfg: DictConfig) -> None:
    """Write the predictions of a checkpoint to a CSV."""
    path = Path(cfg.output or Path(cfg.run_dir, "predictions.csv"))
    trainer, model, data = build(cfg, PredictionTable(path))
    load_weights(model, Path(cfg.checkpoint))
    with user_errors():
        trainer.predict(model, data, return_predictions=False)
    close_process_group()
    if trainer.is_global_zero and path.exists():
        summary.show_predictions(path)


def build(
    cfg: DictConfig, *callbacks: pl.Callback
) -> tuple[pl.Trainer, pl.LightningModule, pl.LightningDataModule]:
    """Build what the config names.

    Raises:
        UserError: if a ``_target_`` does not exist or does not take its arguments.
    """
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # we say what it would say
    check_targets(cfg)
    run_log = RunLog(Path(cfg.run_dir, "run.log"))
    run_log.start(is_first_process=run_folder.global_rank() == 0)
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        log.info("CUDA_VISIBLE_DEVICES=%s", visible)
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    skip_idle_hooks()
    chooses_gpus = OmegaConf.select(cfg, "gpus.order", default="visible") != "visible"
    if chooses_gpus and not torch.cuda.is_available() and run_folder.global_rank() == 0:
        log.warning(
            "This torch cannot use the GPUs, and computes on the CPU: see scripts/doctor.py."
        )
    with user_errors():
        data, model = make(cfg.data), make(cfg.model)
        loggers = [make(node) for node in cfg.logger.values() if node is not None]
        configured = [make(node) for node in cfg.callbacks.values() if node is not None]
        # Lightning refuses callbacks that would have nothing to do.
        idle: list[type[pl.Callback]] = []
        idle += [pl.callbacks.ProgressBar] * (not cfg.trainer.enable_progress_bar)
        idle += [pl.callbacks.LearningRateMonitor] * (not loggers)
        configured = [c for c in configured if not isinstance(c, tuple(idle))]
        own = [run_log, *safe_points(cfg), SeededSteps(cfg.seed)]
        own += [UnevenBatches(), ExactEvaluation(), DeadRanks()]
        checkpoint_io = DurableCheckpointIO(cfg.on_full_disk if "on_full_disk" in cfg else "stop")
        plugins: dict[str, Any] = {"plugins": [checkpoint_io]}
        on_cpu = cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available()
        if cfg.trainer.sync_batchnorm and on_cpu:
            # torch's own layer runs on GPUs only.
            plugins = {"plugins": [checkpoint_io, SyncBatchNormAnywhere()], "sync_batchnorm": False}
        trainer = instantiate(
            cfg.trainer,
            **plugins,
            callbacks=sorted([*own, *configured, *callbacks], key=comes_later),
            logger=loggers,
            default_root_dir=cfg.run_dir,
            enable_checkpointing=any(isinstance(c, pl.callbacks.Checkpoint) for c in configured),
            _convert_="all",
        )
    check_processes(trainer)
    observe_start()
    if trainer.world_size == 1:  # each callback costs some microseconds in every step
        trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, Replicas)]
    return trainer, model, data


def comes_later(callback: pl.Callback) -> bool:
    """Sorts what takes the time of the others before them."""
    return not isinstance(callback, Throughput)


def check_processes(trainer: pl.Trainer) -> None:
    """Refuse to be one of several processes that would each train alone; dp looks itself."""
    started = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if started > 1 and trainer.world_size == 1:
        raise UserError(
            f"{started} processes were started, and each would train alone. Add strategy=ddp."
        )


def safe_points(cfg: DictConfig) -> list[pl.Callback]:
    """What writes checkpoints to go on from: in training, unless it is a dry run."""
    if "resume" not in cfg or cfg.checkpoint is None or cfg.trainer.fast_dev_run:
        return []
    return [SafePoint(Path(cfg.run_dir, "checkpoints"), **cfg.checkpoint)]


def make(node: DictConfig) -> Any:
    """Build one object of plain values."""
    return instantiate(node, _convert_="all")


def log_hyperparameters(trainer: pl.Trainer, cfg: DictConfig, metrics: dict[str, float]) -> None:
    """Fill TensorBoard's page of hyper-parameters: what the run was made of and what it reached."""
    config = OmegaConf.to_container(cfg)
    assert isinstance(config, dict)
    settings = {str(key): config[key] for key in ("seed", "data", "model", "trainer")}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            # Names of their own: a learning curve must not get a point of the final value.
            reached = {f"final/{k}": v for k, v in metrics.items() if k.startswith("test/")}
            logger.log_hyperparams(settings, reached or {"final/epoch": trainer.current_epoch})
            logger.finalize("success")


def load_weights(model: pl.LightningModule, path: Path) -> None:
    """Load a checkpoint's weights into a model.

    Raises:
        UserError: if they are not the model's.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    except (RuntimeError, KeyError, TypeError, UnpicklingError) as error:
        raise UserError(f"checkpoint={path} is not a checkpoint of a training run.") from error
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()
        raise UserError(
            f"checkpoint={path} does not fit the model: {' '.join(reason[:2])}\n"
            "Leave out overrides of model.* that change the network."
        ) from error


def scalars(trainer: pl.Trainer) -> dict[str, float]:
    """The last value of every metric."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def speed(trainer: pl.Trainer) -> str | None:
    """What was seen of the run's speed; nothing where it was not watched."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
    seen = [c for c in callbacks if isinstance(c, Throughput) and c.verdict is not None]
    return f"{seen[0].total.samples_per_second:,.0f} samples/s, {seen[0].verdict}" if seen else None


def finish(trainer: pl.Trainer, cfg: DictConfig, metrics: dict[str, float]) -> None:
    """Write the results, once, and end the process group."""
    if trainer.is_global_zero:
        log_hyperparameters(trainer, cfg, metrics)
        results = json.dumps(metrics, indent=2) + "\n"
        write_durably(Path(cfg.run_dir, "results.json"), results.encode())
        summary.show_end(Path(cfg.run_dir), metrics, speed(trainer))
    close_process_group()


@contextmanager
def leaving_together(trainer: pl.Trainer) -> Iterator[None]:
    """Where all processes have agreed to leave, end the process group and wait for the others."""
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        with spawned.answering():
            yield
        return
    try:
        yield
    except AgreedExit:
        close_process_group()
        for process in getattr(trainer.strategy.launcher, "procs", []):
            process.wait()
        raise


def close_process_group() -> None:
    """End the process group together: a gloo group left open aborts at exit now and then."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
