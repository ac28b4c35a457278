"""Trials of an experiment on one device: speed of steps and loaders, and the best learning rate.

In: a config, with a batch size and workers to try. Out: numbers. Each trial builds the experiment
again, as a training does. It trains without validation, callbacks and loggers, and ends inside the
first epoch. Next: ``search`` chooses the trials, and prints their results.
"""

import gc
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from itertools import islice
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf, open_dict
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.tuner.tuning import Tuner
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.data import extract_batch_size

from harness.compat import callbacks_of
from harness.data.loaders import flat_loaders
from harness.data.shared_batches import SharedBatchSampler
from harness.errors import UserError
from harness.features.speed import Speed
from harness.init.freezing import Freezing
from harness.parity.global_batches import GlobalBatches
from harness.training.attachments import Attachments
from harness.training.build import as_user_errors, build

KEPT = (Attachments, GlobalBatches, Speed, Freezing)  # callbacks that change a training step
SECONDS, WARM_UP = 2.0, 3  # length of a trial, and the optimizer steps before it
NUM_CACHED = 4  # batches in memory, on which steps are measured
NUM_SKIPPED = 10  # losses at the start of a search, whose running average is not yet stable
Start = Callable[[pl.Trainer, Any, Any], None]


class EnoughError(Exception):
    """Ends a trial when the measurement is complete."""


class Steps(NamedTuple):
    """The measured optimizer steps of a trial."""

    num_samples: int  # per step
    seconds: float  # per step
    num_bytes: int  # peak of the GPU's memory
    num_all: int  # samples of the data set; 0 if unknown
    num_optimizers: int
    is_manual: bool  # the module has its own loop

    @property
    def speed(self) -> float:
        """Return samples per second."""
        return self.num_samples / self.seconds


class Endless:
    """Repeat an epoch's batches without an end, so that a trial never reaches an epoch's end."""

    def __init__(self, epoch_batches: Callable[[], Iterable[Any]]) -> None:
        self.epoch_batches = epoch_batches

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.epoch_batches()

    def __len__(self) -> int:
        return 10**6  # a schedule needs a length to plan the whole run


class Timer(pl.Callback):
    """Time optimizer steps, then end the trial."""

    num_bytes, num_batches, seconds = 0, 0, 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove schedules, because they may monitor a value of the missing validation."""
        self.device, self.num_optimizers = trainer.strategy.root_device, len(trainer.optimizers)
        self.is_manual = not pl_module.automatic_optimization
        if not self.is_manual:
            trainer.strategy.lr_scheduler_configs = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Count a batch; synchronise only at the start and the end of the measurement."""
        self.num_batches += 1
        num_steps, rest = divmod(self.num_batches, int(trainer.accumulate_grad_batches))
        if rest or num_steps < WARM_UP:
            return
        if num_steps == WARM_UP:
            self.start = self._now()
        elif time.perf_counter() - self.start > SECONDS:
            self.seconds = (self._now() - self.start) / (num_steps - WARM_UP)
            if self.device.type == "cuda":
                self.num_bytes = torch.cuda.max_memory_allocated(self.device)
            raise EnoughError

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # synchronises
        return time.perf_counter()


def single_device_config(cfg: Any, folder: str) -> Any:
    """Return a config for trials: one device, no validation, no logger, output in ``folder``."""
    devices, empty = cfg.trainer.devices, dict[str, Any]()
    run: dict[str, Any] = {"run_dir": folder, "resume": None, "checkpoint": None, "compile": False}
    run |= {"callbacks": empty, "logger": empty, "parity_check": False}
    trainer = {
        **{"strategy": "auto", "num_nodes": 1, "profiler": None, "sync_batchnorm": False},
        **{"max_epochs": 1, "max_steps": -1, "max_time": None, "limit_train_batches": None},
        **{"limit_val_batches": 0, "num_sanity_val_steps": 0, "val_check_interval": None},
        **{"check_val_every_n_epoch": 10**6, "overfit_batches": 0.0, "fast_dev_run": False},
        **{"devices": [devices[0]] if OmegaConf.is_list(devices) else 1},
        "enable_progress_bar": False,
    }
    with open_dict(cfg):
        cfg.update(run)
        cfg.trainer.update(trainer)
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))


def fit(
    cfg: Any,
    train_on: Callable[[Any], Endless],
    *callbacks: pl.Callback,
    start: Start | None = None,
) -> None:
    """Build the experiment and train it, until something raises ``EnoughError``.

    Args:
        cfg: the result of ``single_device_config``.
        train_on: takes the training loaders of the run, and returns the batches to train on.
        callbacks: added to the library's callbacks that change a step.
        start: called with trainer, module and data, in place of ``Trainer.fit``.
    """
    gc.collect()  # frees the memory of the trial before this one
    torch.cuda.empty_cache()  # does nothing if CUDA was not used
    with (
        open(os.devnull, "w") as null,
        redirect_stdout(null),
        redirect_stderr(null),
        warnings.catch_warnings(action="ignore"),  # a training shows them
    ):
        trainer, model, data = build(OmegaConf.create(cfg))  # a copy, because build changes it
        kept = [callback for callback in callbacks_of(trainer) if isinstance(callback, KEPT)]
        trainer.callbacks = [*kept, *callbacks]  # type: ignore[attr-defined]  # set untyped
        trainer.loggers = [DummyLogger()]
        global_batches = next(c for c in kept if isinstance(c, GlobalBatches))
        make = global_batches.make_loaders

        def make_loaders(trainer: pl.Trainer, source: Any, method: str, request: Any) -> Any:
            loaders = make(trainer, source, method, request)
            global_batches.splitters = []  # a batch of ``Endless`` has no position in an epoch
            return train_on(loaders) if method == "train_dataloader" else loaders

        global_batches.make_loaders = make_loaders  # type: ignore[method-assign]
        with as_user_errors(cfg), suppress(EnoughError):
            (start or (lambda *built: trainer.fit(*built[1:])))(trainer, model, data)


def batches_of(loaders: Any) -> Iterator[Any]:
    """Yield the batches of an epoch as a step gets them, also from several loaders."""
    is_combined = isinstance(loaders, CombinedLoader)
    combined = loaders if is_combined else CombinedLoader(loaders, "max_size_cycle")
    num = 0
    for batch, *_ in combined:
        num += 1
        yield batch
    if not num:
        raise UserError("The training loader gave no batch. Use a smaller data.batch_size.")


def measure_steps(cfg: Any, size: int | None) -> Steps:
    """Time steps on batches that are in memory.

    Args:
        cfg: the result of ``single_device_config``, with the batch size to measure.
        size: the batch size in the config; ``None`` means the size of the first batch.
    """
    timer, num_all, batch_size = Timer(), 0, size or 0

    def cache_batches(loaders: Any) -> Endless:
        nonlocal num_all, batch_size
        batches = list(islice(batches_of(loaders), NUM_CACHED))
        samplers = [getattr(loader, "batch_sampler", None) for loader in flat_loaders(loaders)]
        counted = [s.settings() for s in samplers if isinstance(s, SharedBatchSampler)]
        num_all = min((settings["num_samples"] for settings in counted), default=0)
        with suppress(Exception):  # Lightning does not know the type of the batch
            batch_size = extract_batch_size(batches[0])
        return Endless(lambda: batches)

    fit(cfg, cache_batches, timer)
    if not timer.seconds:
        raise UserError(
            f"The training ended after {timer.num_batches} batches, but a trial needs {SECONDS:g} "
            "s of steps. Remove what ends the training, such as trainer.should_stop = True."
        )
    num_samples = min(batch_size, num_all or batch_size)
    numbers = (timer.num_bytes, num_all, timer.num_optimizers, timer.is_manual)
    return Steps(num_samples, timer.seconds, *numbers)


def measure_loader(cfg: Any, num_workers: int) -> float:
    """Return how many batches per second the loader gives, once its workers run."""
    batches_per_second = 0.0

    def measure(loaders: Any) -> Endless:
        nonlocal batches_per_second
        batches = iter(Endless(lambda: batches_of(loaders)))
        list(islice(batches, 1 + 2 * num_workers))  # batches that the workers have read ahead
        start, num, seconds = time.perf_counter(), 0, 0.0
        while seconds < SECONDS or num < 2:
            next(batches)
            num, seconds = num + 1, time.perf_counter() - start
        batches_per_second = num / seconds
        raise EnoughError

    fit(OmegaConf.merge(cfg, {"data": {"num_workers": num_workers}}), measure)
    return batches_per_second


def find_rate(cfg: Any, num_steps: int) -> float | str:
    """Train with rates that grow from 1e-6 to 1, and return the best, or why there is none."""
    finder: Any = None

    def search(trainer: pl.Trainer, model: Any, data: Any) -> None:
        nonlocal finder
        trainer.strategy.checkpoint_io = TorchCheckpointIO()  # the run's reads only its own files
        vars(model)["on_train_epoch_end"] = lambda: None  # the hook may read values of a validation
        options: dict[str, Any] = {"min_lr": 1e-6, "num_training": num_steps, "update_attr": False}
        finder = Tuner(trainer).lr_find(model, datamodule=data, **options)

    fit(cfg, lambda loaders: Endless(lambda: batches_of(loaders)), start=search)
    losses = finder.results["loss"]
    if not any(map(math.isfinite, losses)):
        return "the loss is not finite, even with a rate of 1e-6"
    return steepest(finder.results["lr"], losses)


def steepest(rates: list[float], losses: list[float]) -> float | str:
    """Return the rate at which the loss falls fastest, relative to the rate's logarithm.

    The rates grow by a constant factor. Lightning's own suggestion takes the slope relative to the
    rate itself, which is large by chance at tiny rates.
    """
    values = torch.tensor(losses[NUM_SKIPPED:])
    if len(values) < 2:
        return "the search ended after too few steps"
    slopes = torch.gradient(values)[0].nan_to_num(0.0)
    index = int(slopes.argmin())
    if slopes[index] >= 0:
        return "the loss falls at no rate from 1e-6 to 1"
    if index >= len(slopes) - 2:
        return "the loss falls fastest at the largest rate of the search"
    return rates[NUM_SKIPPED + index]
