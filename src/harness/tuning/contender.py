"""A process that trains an experiment by turns, as the one that has started it says.

Processes have TF32, cuDNN's choice, compiled code and peak memory of their own, and what crashes
takes nothing with it. One that waits gives back the memory that its GPU keeps for the next step.
"""

import copy
import os
import resource
import signal
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf

from harness import allowed
from harness.errors import UserError
from harness.exact.seeded_steps import SeededSteps
from harness.run import tasks as run
from harness.run.mistakes import of_owner, user_errors
from harness.strategies.batch_sizes import batch_sizes
from harness.strategies.launchable import num_processes
from harness.tuning.settings import one_process
from harness.tuning.switches import Switch, switches
from harness.upstream.endless import train_without_end

LEAST_STEPS = 3  # whose losses are compared, however long they take


class Failed(NamedTuple):
    """Why a process trains no more."""

    sentence: str


class Ready(NamedTuple):
    """The first batch is there."""

    switches: list[Switch]
    num_steps: float  # of the run


class First(NamedTuple):
    """What the first steps came to."""

    losses: list[float]  # all that had a backward pass
    seconds: list[float]  # of each step
    draws: bool  # whether a step draws random numbers
    is_counted: bool  # whether samples are known, or batches alone


class Turn(NamedTuple):
    """The steps of some time."""

    samples_per_second: float
    is_finite: bool  # the last loss
    peak_bytes: int  # on the GPU if there is one, else of the process


def train_by_turns(
    connection: Connection, cfg: DictConfig, conf: Path, folder: str, draws_otherwise: bool
) -> None:
    """Answer orders until the connection is closed.

    Args:
        connection: gives the most steps and seconds, answered with ``First``, and then seconds
            alone, with ``Turn``. ``Ready`` comes before, ``Failed`` in place of any.
        cfg: of a training command.
        conf: the folder whose rules say what may be built.
        folder: for everything that is written; the other process removes it.
        draws_otherwise: draw other random numbers in steps, from the same weights and batches.
    """
    allowed.follow(conf)
    tempfile.tempdir = folder  # also for what torch compiles
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it has reached the other process as well
    with open(os.devnull, "w") as nowhere:  # the plain run says what train.py would
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    turns = Turns(connection, copy.deepcopy(cfg))
    try:
        if OmegaConf.select(cfg, "data.batch_size") is not None:  # what one process computes
            cfg.data.batch_size = max(1, cfg.data.batch_size // num_processes(cfg.trainer))
        cfg.trainer.update(fast_dev_run=False, max_time=None, profiler=None)
        cfg.trainer.update(limit_val_batches=0, num_sanity_val_steps=0)
        with one_process(cfg) as (trainer, model, data):
            for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set untyped
                if isinstance(callback, SeededSteps) and draws_otherwise:
                    callback.seed += 1
            trainer.callbacks.append(turns)  # type: ignore[attr-defined]
            with user_errors(cfg):
                run.seed(cfg)
                trainer.fit(model, data)
        sentence = f"training ends by itself after {trainer.global_step} steps"
    except BaseException as error:
        is_told = isinstance(error, UserError)
        said = str(error) if is_told else of_owner(error) or f"{type(error).__name__}: {error}"
        sentence = "\n".join(line for line in said.splitlines() if "HYDRA_FULL" not in line)
    with suppress(ConnectionError):  # the other process wants no more
        connection.send(Failed(sentence))


class Turns(pl.Callback):
    """Train when the other process says so, and tell it what came of that."""

    def __init__(self, connection: Connection, typed: DictConfig) -> None:
        self.connection, self.typed = connection, typed
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self.num_first, self.draws, self.is_warming_up = 0, False, True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Train for as long as it is wanted; what is planned for the run's end stays planned."""
        self.device = trainer.strategy.root_device
        num_steps = float(trainer.estimated_stepping_batches) * trainer.accumulate_grad_batches
        train_without_end(trainer)
        # Nothing is validated, which plateaus are seen by; and they come late.
        schedules = trainer.strategy.lr_scheduler_configs
        if pl_module.automatic_optimization:
            schedules[:] = [one for one in schedules if not one.reduce_on_plateau]
        found = switches(self.typed, trainer, pl_module)
        self.connection.send(Ready(found, num_steps))
        self.num_first, self.most_seconds = self.connection.recv()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step; generators are seeded by now."""
        if not self.seconds:
            self.before = self._generators()
        if len(self.seconds) < self.num_first:
            self.started = self._now()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor
    ) -> None:
        """Keep the losses of the first steps, and the last one."""
        if len(self.seconds) >= self.num_first:
            self.losses.clear()
        self.losses.append(loss.detach().float().mean())

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """End a step, and a turn with it if it was the last."""
        if len(self.seconds) < self.num_first:
            self.draws |= not self.seconds and self._generators() != self.before
            self.seconds.append(self._now() - self.started)
            if sum(self.seconds) > self.most_seconds and len(self.seconds) >= LEAST_STEPS:
                self.num_first = len(self.seconds)
            if len(self.seconds) == self.num_first:
                losses = [loss.item() for loss in self.losses]
                is_counted = bool(batch_sizes(trainer, (None, batch_idx)))
                self._answer(trainer, First(losses, self.seconds, self.draws, is_counted))
            return
        if self.is_warming_up:  # the first step after a pause
            self.is_warming_up, self.num_samples, self.started = False, 0, self._now()
            return
        self.num_samples += sum(batch_sizes(trainer, (None, batch_idx))) or 1
        # Only the end waits for the device.
        if time.perf_counter() >= self.started + self.wanted:
            speed = self.num_samples / (self._now() - self.started)
            is_finite = all(bool(loss.isfinite()) for loss in self.losses)
            self._answer(trainer, Turn(speed, is_finite, self._peak_bytes()))

    def _answer(self, trainer: pl.Trainer, answer: First | Turn) -> None:
        if isinstance(answer, First) and trainer.lightning_module.automatic_optimization:
            # Training stays at the rate that it has come to: a schedule may be at its end.
            trainer.strategy.lr_scheduler_configs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.connection.send(answer)
        self.wanted, self.is_warming_up = self.connection.recv(), True
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _generators(self) -> list[bytes]:
        states = [torch.get_rng_state()]
        states += [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [state.numpy().tobytes() for state in states]

    def _peak_bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
