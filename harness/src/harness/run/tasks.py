"""A run, from its frozen config to its results: train, evaluate or predict.

The only place that knows both the config and the Trainer; everything that is built here takes
plain values.
"""

import json
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.strategies import DDPStrategy

from harness import record
from harness.allowed import instantiate
from harness.checkpoints.lookup import verified
from harness.checkpoints.safe_point import SafePoint
from harness.checkpoints.writing import DurableCheckpointIO
from harness.data import facts
from harness.exact import unfrozen
from harness.exact.evaluation import ExactEvaluation
from harness.exact.first_batch_callback import FirstBatchCheck
from harness.exact.global_batches import GlobalBatches
from harness.exact.seeded_steps import SeededSteps
from harness.exact.sync_batch_norm import SyncBatchNormAnywhere
from harness.frozen_files import write_json
from harness.knobs import trackers
from harness.knobs.speed import SWITCHES, Speed
from harness.loggers.guarded import guarded
from harness.loggers.rewind import Logs
from harness.processes.dead_ranks import DeadRanks, observe_start
from harness.processes.launch import global_rank
from harness.processes.leaving import AgreedExit
from harness.processes.slurm import environments
from harness.run import loaders, screen
from harness.run.log_file import LogFile
from harness.run.making import made_data, made_model, make
from harness.run.mistakes import user_errors
from harness.run.optimizer_states import OptimizerStates
from harness.run.provenance import Provenance, tell_changes
from harness.run.results import LAST_WEIGHTS, best_of, chosen_objective, early_stop, scalars, speed
from harness.run.targets import check_kinds, check_targets
from harness.run.weights import link_best, load_weights
from harness.strategies.launchable import OF_LIGHTNING, is_spawning
from harness.upstream import clipping, processes, versions
from harness.upstream.step_overhead import skip_empty_hooks
from harness.watch.objective import Objective, explaining
from harness.watch.replicas import Replicas
from harness.watch.throughput import Throughput

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> None:
    """Fit, test the best checkpoint, and write what came out."""
    trainer, model, data = build(cfg)
    tell_changes(cfg.resume)
    loaders.check_training(model, data)
    with user_errors():  # the config of an older run may lack a key
        screen.show_start(trainer, model, data, cfg.resume, cfg.tags, cfg.notes)
    if cfg.resume is None and global_rank() == 0:
        Logs(Path(cfg.run_dir)).rewind()  # of a start that came to no checkpoint
    with user_errors(cfg), leaving_together(trainer), explaining(trainer):
        if cfg.resume is None:
            trackers.log_settings(trainer.loggers, cfg)
        seed(cfg)
        trainer.fit(model, data, ckpt_path=cfg.resume, weights_only=True)
        metrics = scalars(trainer)
        # A run without checkpoints, such as fast_dev_run, tests the weights that it has.
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        has_best = bool(best) and link_best(trainer, Path(best))
        missing = loaders.no_test(model, data)
        if cfg.test and missing and trainer.is_global_zero:
            log.warning("No test: %s.", missing)
        if missing is None and cfg.test and not trainer.interrupted:
            if has_best:
                load_weights(model, Path(best))
            elif best:
                metrics[LAST_WEIGHTS] = True
            seed(cfg)
            trainer.test(model, data, verbose=False)
            metrics |= scalars(trainer)
    finish(trainer, cfg, metrics)


def evaluate(cfg: DictConfig) -> None:
    """Test a checkpoint and write the metrics."""
    trainer, model, data = build(cfg)
    tell_changes(cfg.checkpoint)
    loaders.check_test(model, data)
    load_weights(model, Path(cfg.checkpoint))  # the command has verified it
    with user_errors(cfg):
        seed(cfg)
        trainer.test(model, data, verbose=False)
    finish(trainer, cfg, scalars(trainer))


def predict(cfg: DictConfig) -> None:
    """Write the predictions of a checkpoint to a CSV; what is no table goes beside it."""
    trainer, model, data = build(cfg)
    tell_changes(cfg.checkpoint)
    load_weights(model, Path(cfg.checkpoint))  # the command has verified it
    loaders.choose_prediction_loader(model, data)
    outputs = [Path(cfg.output), Path(cfg.output).with_suffix(".pt")]
    before = [path.stat() if path.exists() else None for path in outputs]
    with user_errors(cfg), loaders.explaining_forward(model):
        seed(cfg)
        trainer.predict(model, data, return_predictions=False)
    close_process_group()
    if trainer.is_global_zero:
        for path, old in zip(outputs, before, strict=True):
            if path.exists() and path.stat() != old:  # written by this run
                screen.show_predictions(path)


def seed(cfg: DictConfig) -> None:
    """Seed all generators; before each stage, so that what a test draws is what it draws again."""
    pl.seed_everything(cfg.seed, workers=True, verbose=False)


def build(cfg: DictConfig) -> tuple[pl.Trainer, pl.LightningModule, pl.LightningDataModule | None]:
    """Build what the config names; with ``data: null`` the model has the loaders.

    Raises:
        UserError: if a ``_target_`` does not exist or does not take its arguments.
    """
    with user_errors():
        check_targets(cfg)
    run_log = LogFile(Path(cfg.run_dir, "run.log"), packages(cfg))
    run_log.start(is_first_process=global_rank() == 0)
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        log.info("CUDA_VISIBLE_DEVICES=%s", visible)
    seed(cfg)
    chooses_gpus = OmegaConf.select(cfg, "gpus.order", default="visible") != "visible"
    if chooses_gpus and not torch.cuda.is_available() and global_rank() == 0:
        log.warning(
            "This torch cannot use the GPUs, and computes on the CPU: "
            "`python -m torch.utils.collect_env` shows what it was built for."
        )
    if is_spawning(cfg.trainer):
        log.warning(OF_LIGHTNING)
    with user_errors(cfg):
        data = made_data(cfg)
        model, freezing = made_model(cfg)
        trackers.send_no_reports()
        loggers = [guarded(make(node)) for node in cfg.logger.values() if node]
        callbacks = configured_callbacks(cfg, has_loggers=bool(loggers))
        check_kinds(model, data, callbacks, loggers)
        # The position comes first: a safe point asks for the loaders as it is loaded. What may
        # refuse a checkpoint comes before it too: it cuts the logs.
        own: list[pl.Callback] = [run_log, GlobalBatches(cfg.seed), *provenance(cfg)]
        own += [Speed(*map(cfg.get, SWITCHES))]  # an evaluation has none
        own += [
            *freezing,
            *safe_points(cfg),
            SeededSteps(cfg.seed),
            ExactEvaluation(),
            FirstBatchCheck(),
            DeadRanks(),
            Objective(chosen_objective(cfg)),
        ]
        trainer = instantiate(
            cfg.trainer,
            **plugins(cfg),
            # What takes the time of the others comes before them.
            callbacks=sorted([*own, *callbacks], key=lambda c: not isinstance(c, Throughput)),
            logger=loggers,
            default_root_dir=cfg.run_dir,
            enable_checkpointing=any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
            _convert_="all",
        )
    versions.check(trainer)
    if type(trainer.strategy) is DDPStrategy:
        trainer.strategy.__class__ = unfrozen.DDPStrategy
    observe_start()
    skip_empty_hooks(trainer)
    clipping.allow_without_scaler(trainer)
    # Each callback costs some microseconds in every step.
    idle: list[type[pl.Callback]] = [] if trainer.world_size > 1 else [Replicas]
    trainer.callbacks = [c for c in trainer.callbacks if not isinstance(c, tuple(idle))]
    return trainer, model, data


def configured_callbacks(cfg: DictConfig, has_loggers: bool) -> list[pl.Callback]:
    """The callbacks that the config names, but for those that would have nothing to do."""
    callbacks: list[pl.Callback] = [make(node) for node in cfg.callbacks.values() if node]
    idle: list[type[pl.Callback]] = []
    if "resume" not in cfg:  # an evaluation has the callbacks of the run that it evaluates
        idle.append(pl.callbacks.Checkpoint)
    if not cfg.trainer.enable_progress_bar:  # Lightning refuses these where they are idle
        idle.append(pl.callbacks.ProgressBar)
    if not has_loggers:
        idle.append(pl.callbacks.LearningRateMonitor)
    callbacks = [callback for callback in callbacks if not isinstance(callback, tuple(idle))]
    for callback in callbacks:
        # Of several files with one name only the last would stay.
        if isinstance(callback, pl.callbacks.ModelCheckpoint) and callback.save_top_k not in (0, 1):
            name = callback.filename or "best"
            callback.filename = name if "{" in name else name + "-{epoch}-{step}"
    return callbacks


def plugins(cfg: DictConfig) -> dict[str, Any]:
    """The Trainer's arguments for what writes checkpoints, finds ranks, synchronises BatchNorm."""
    plugins: list[Any] = [DurableCheckpointIO(), *environments()]
    on_cpu = cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available()
    if cfg.trainer.sync_batchnorm and on_cpu:  # torch's own layer runs on GPUs only
        return {"plugins": [*plugins, SyncBatchNormAnywhere()], "sync_batchnorm": False}
    return {"plugins": plugins}


def packages(cfg: DictConfig) -> set[str]:
    """The packages of everything that the config names: what they log is the run's."""
    named = set(re.findall(r"_target_: (\w+)\.", OmegaConf.to_yaml(cfg)))
    return named - {"torch"}  # which tells of its compiler's inner life


def safe_points(cfg: DictConfig) -> list[pl.Callback]:
    """What writes checkpoints to go on from: in training, unless it is a dry run."""
    if "resume" not in cfg or cfg.checkpoint is None or cfg.trainer.fast_dev_run:
        return []
    return [SafePoint(Path(cfg.run_dir, "checkpoints"), **cfg.checkpoint)]


def provenance(cfg: DictConfig) -> list[pl.Callback]:
    """What notes the code and data of a training, and refuses other optimizers: no dry run's."""
    is_kept = "resume" in cfg and not cfg.trainer.fast_dev_run
    return [OptimizerStates(), Provenance(cfg)] if is_kept else []


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


def load_model(cfg: DictConfig, checkpoint: Path) -> pl.LightningModule:
    """A run's module with the weights of a checkpoint, on the CPU, ready for evaluation."""
    with user_errors():
        cfg = OmegaConf.masked_copy(cfg, ["model"])
        check_targets(cfg)
        facts.fill_in(cfg, None, checkpoint.resolve().parent.parent)
        model: pl.LightningModule = make(cfg.model)
    tell_changes(checkpoint)
    load_weights(model, verified(checkpoint))
    return model.eval()


def finish(trainer: pl.Trainer, cfg: DictConfig, metrics: dict[str, float]) -> None:
    """Write the results, once, and end the process group."""
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
        screen.show_end(Path(cfg.run_dir), metrics, seen | early, has_test)
    close_process_group()


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
