"""Trials of an experiment on one device: how fast steps and loaders are, and which rate learns.

In: a config, with a batch size and workers to try. Out: numbers. Each trial builds the experiment
anew, as a training does, fits it without validation, callbacks and loggers, and ends inside the
first epoch. Next: ``search`` chooses what to try, and prints it.
"""

import gc
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
from harness.training.build import build, user_errors

KEPT = (
    Attachments,
    GlobalBatches,
    Speed,
    Freezing,
)  # callbacks without which a step would be another one
SECONDS, WARM_UP = 2.0, 3  # of a trial, and the optimizer steps before it
CACHED = 4  # batches in memory, of which steps are measured
SKIPPED = 10  # of a search, whose loss is a running average
Start = Callable[[pl.Trainer, Any, Any], None]


class EnoughError(Exception):
    """Ends a trial, which has measured what it wanted."""


class Steps(NamedTuple):
    """Optimizer steps of a trial."""

    num_samples: int  # of a step
    seconds: float  # of a step
    num_bytes: int  # of the GPU's memory, at the most
    num_all: int  # samples of the data set; 0 where nobody knows
    num_optimizers: int
    is_manual: bool  # the module has its own loop

    @property
    def speed(self) -> float:
        """Return samples per second."""
        return self.num_samples / self.seconds


class Endless:
    """Batches without an end, so that no epoch ends; ``begin`` gives those of an epoch."""

    def __init__(self, begin: Callable[[], Iterable[Any]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.begin()

    def __len__(self) -> int:
        return 10**6  # so that a schedule can plan for the whole run


class Timer(pl.Callback):
    """Time optimizer steps, and end the trial."""

    num_bytes, num_batches, seconds = 0, 0, 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget schedules, which may look at a validation that is not there."""
        self.device, self.num_optimizers = trainer.strategy.root_device, len(trainer.optimizers)
        self.is_manual = not pl_module.automatic_optimization
        if not self.is_manual:
            trainer.strategy.lr_scheduler_configs = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Count a batch; wait for the device at both ends of the measurement alone."""
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


def alone(cfg: Any, folder: str) -> Any:
    """Return the config of one device, which writes into a folder, and neither tests nor logs."""
    devices, nothing = cfg.trainer.devices, dict[str, Any]()
    run: dict[str, Any] = {"run_dir": folder, "resume": None, "checkpoint": None, "compile": False}
    run |= {"callbacks": nothing, "logger": nothing, "parity_check": False}
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
    """Build the experiment and fit it, until something raises ``EnoughError``.

    Args:
        cfg: of ``alone``.
        train_on: gets the training loaders of the run, and returns the batches to train on.
        callbacks: beside those of the library that change a step.
        start: called with trainer, module and data, in place of ``Trainer.fit``.
    """
    gc.collect()  # the trial before
    torch.cuda.empty_cache()  # nothing where CUDA was not used
    with (
        open(os.devnull, "w") as nobody,
        redirect_stdout(nobody),
        redirect_stderr(nobody),
        warnings.catch_warnings(action="ignore"),  # a training shows them
    ):
        trainer, model, data = build(OmegaConf.create(cfg))  # a copy: facts are filled in
        kept = [one for one in callbacks_of(trainer) if isinstance(one, KEPT)]
        trainer.callbacks = [*kept, *callbacks]  # type: ignore[attr-defined]  # set untyped
        trainer.loggers = [DummyLogger()]
        sharing = next(one for one in kept if isinstance(one, GlobalBatches))
        make = sharing.make_loaders

        def make_loaders(trainer: pl.Trainer, source: Any, method: str, request: Any) -> Any:
            loaders = make(trainer, source, method, request)
            sharing.sharing = []  # what comes from ``Endless`` has no place in an epoch
            return train_on(loaders) if method == "train_dataloader" else loaders

        sharing.make_loaders = make_loaders  # type: ignore[method-assign]
        with user_errors(cfg), suppress(EnoughError):
            (start or (lambda *built: trainer.fit(*built[1:])))(trainer, model, data)


def batches_of(loaders: Any) -> Iterator[Any]:
    """Yield the batches of an epoch as a step gets them, also those of several loaders."""
    is_combined = isinstance(loaders, CombinedLoader)
    combined = loaders if is_combined else CombinedLoader(loaders, "max_size_cycle")
    num = 0
    for batch, *_ in combined:
        num += 1
        yield batch
    if not num:
        raise UserError("The training loader gave no batch: use a smaller data.batch_size.")


def measure_steps(cfg: Any, size: int | None) -> Steps:
    """Time steps of so many samples, or of as many as there are, on batches that are in memory."""
    timer, found = Timer(), dict[str, int]()

    def cached(loaders: Any) -> Endless:
        batches = list(islice(batches_of(loaders), CACHED))
        samplers = [getattr(one, "batch_sampler", None) for one in flat_loaders(loaders)]
        counted = [one for one in samplers if isinstance(one, SharedBatchSampler)]
        found["all"] = min((one.settings()["num_samples"] for one in counted), default=0)
        found["here"] = size or extract_batch_size(batches[0])
        return Endless(lambda: batches)

    fit(cfg, cached, timer)
    num_samples = min(found["here"], found["all"] or found["here"])
    numbers = (timer.num_bytes, found["all"], timer.num_optimizers, timer.is_manual)
    return Steps(num_samples, timer.seconds, *numbers)


def measure_loader(cfg: Any, num_workers: int) -> float:
    """Return how many batches per second the loader gives, once its workers run."""
    found = 0.0

    def measure(loaders: Any) -> Endless:
        nonlocal found
        batches = iter(Endless(lambda: batches_of(loaders)))
        list(islice(batches, 1 + 2 * num_workers))  # what workers have read ahead
        start, num, seconds = time.perf_counter(), 0, 0.0
        while seconds < SECONDS or num < 2:
            next(batches)
            num, seconds = num + 1, time.perf_counter() - start
        found = num / seconds
        raise EnoughError

    fit(OmegaConf.merge(cfg, {"data": {"num_workers": num_workers}}), measure)
    return found


def find_rate(cfg: Any, num_steps: int) -> float | None:
    """Train steps with rates that grow from 1e-6 to 1, and return the best; None if none learns."""
    found: Any = None

    def search(trainer: pl.Trainer, model: Any, data: Any) -> None:
        nonlocal found
        trainer.strategy.checkpoint_io = TorchCheckpointIO()  # ours reads those of a run alone
        vars(model)["on_train_epoch_end"] = lambda: None  # it may look at a validation
        given: dict[str, Any] = {"min_lr": 1e-6, "num_training": num_steps, "update_attr": False}
        found = Tuner(trainer).lr_find(model, datamodule=data, **given)

    fit(cfg, lambda loaders: Endless(lambda: batches_of(loaders)), start=search)
    return steepest(found.results["lr"], found.results["loss"])


def steepest(rates: list[float], losses: list[float]) -> float | None:
    """Return the rate at which the loss falls fastest, by the rate's logarithm.

    Lightning's own suggestion takes the slope by the rate itself, which is steepest by chance where
    rates are tiny.
    """
    values = torch.tensor(losses[SKIPPED:])
    if len(values) < 2:
        return None
    slopes = torch.gradient(values)[0].nan_to_num(0.0)
    place = int(slopes.argmin())
    return rates[SKIPPED + place] if slopes[place] < 0 else None
