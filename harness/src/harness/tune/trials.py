"""Settings of an experiment that are found by trying them in one process, without a run.

The results hold for several processes, because training is the same under every strategy.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytorch_lightning as pl
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from pytorch_lightning.tuner.tuning import Tuner

from harness.command import validate
from harness.command.compose import compose_command
from harness.command.start import choose_gpus
from harness.data.datamodule import DataModule
from harness.errors import UserError
from harness.run import build as run
from harness.run import log_file as run_log
from harness.run.build import make
from harness.run.mistakes import user_errors
from harness.strategies.launchable import device_indices, num_processes, strategy_name

LARGEST = 8192  # Lightning's search for a batch size ends here
SMALLEST = 2


class BatchSize(NamedTuple):
    """The largest batch, in powers of two, that one process could train with."""

    per_process: int
    of_all_processes: int  # what data.batch_size counts
    is_out_of_memory: bool  # twice as many samples did not fit


def composed(overrides: Sequence[str]) -> Any:
    """Compose and check the config of a training command.

    Raises:
        UserError: with what to type instead.
    """
    command = compose_command("train", list(overrides), "conf")
    validate.check(command)
    return OmegaConf.create(OmegaConf.to_container(command.cfg, resolve=True))


def choose_workers(cfg: Any) -> int:
    """Measure reading the training data with 0, 1, 2, 4, … workers per process.

    Raises:
        UserError: if the data is not a ``harness.DataModule``.
    """
    num_ranks = num_processes(cfg.trainer)
    with user_errors():
        data = own_data(None if cfg.data is None else make(cfg.data), "workers")
        return int(data.choose_workers("train", num_ranks, cfg.trainer.num_nodes))


def find_batch_size(cfg: Any) -> BatchSize:
    """Double the batch until memory, the data set, or the search's range is exhausted.

    Raises:
        UserError: where not even two samples fit, or the data is not a ``harness.DataModule``.
    """
    num_ranks = num_processes(cfg.trainer)
    cfg.trainer.accumulate_grad_batches = 1
    with one_process(cfg) as (trainer, model, built):
        data = own_data(built, "batch-size")
        data.max_samples_per_device = None  # it would split the batches that are tried
        data.drop_last = False
        num_samples = len(data.dataset("train"))  # type: ignore[arg-type]
        largest = min(LARGEST, num_samples)
        data.batch_size = SMALLEST
        # The search ends by loading the state it has saved, which has another batch size.
        data.load_state_dict = lambda _: None  # type: ignore[method-assign,assignment]
        found = Tuner(trainer).scale_batch_size(
            model, datamodule=data, init_val=SMALLEST, max_val=largest + 1
        )
    if not found or found < SMALLEST:
        raise UserError("Not even a batch of two samples fits in memory: use a smaller model.")
    if found > largest:  # Lightning has doubled once more without trying
        found //= 2
    return BatchSize(found, min(found * num_ranks, num_samples), 2 * found <= largest)


def find_learning_rate(
    cfg: Any, lowest: float, highest: float, num_steps: int
) -> tuple[float, Figure]:
    """Train some steps with a rate that grows from ``lowest`` to ``highest``.

    Returns:
        The rate at which the loss falls the fastest, and the curve of the losses.

    Raises:
        UserError: where the losses show no fall.
    """
    cfg.trainer.max_steps = -1
    with one_process(cfg) as (trainer, model, data):
        steps_per_epoch = 1  # at least
        if isinstance(data, DataModule):
            num_samples = len(data.dataset("train"))  # type: ignore[arg-type]
            steps_per_epoch = max(1, num_samples // data.batch_size)
        epochs = num_steps // steps_per_epoch + 2
        trainer.fit_loop.max_epochs = max(epochs, cfg.trainer.max_epochs or 0)
        finder: Any = Tuner(trainer).lr_find(
            model,
            datamodule=data,
            min_lr=lowest,
            max_lr=highest,
            num_training=num_steps,
            update_attr=False,
        )
    suggestion = finder.suggestion()
    if suggestion is None:
        raise UserError(f"{len(finder.results['lr'])} steps are too few: use a larger --steps.")
    picture = Figure(figsize=(6, 4), layout="constrained")
    finder.plot(suggest=True, ax=picture.add_subplot(title="Loss at growing learning rates"))
    return suggestion, picture


def own_data(data: Any, what: str) -> DataModule:
    """The data, where it is one whose batches the harness makes.

    Raises:
        UserError: for any other.
    """
    if not isinstance(data, DataModule):
        found = "data=null" if data is None else f"{type(data).__module__}.{type(data).__name__}"
        raise UserError(
            f"tune.py {what} needs a harness.DataModule, and {found} is none.\n"
            "Inherit harness.DataModule (python scripts/new.py data mine shows one), or try values "
            "by hand: a run says at its end how fast it was and what held it back."
        )
    return data


@contextmanager
def one_process(cfg: Any) -> Iterator[tuple[pl.Trainer, pl.LightningModule, Any]]:
    """Build one process of an experiment that writes no folder, no logs and no pictures.

    It has one device, or under dp and ddp2 the devices of its node.
    """
    cfg.callbacks, cfg.logger, cfg.checkpoint, cfg.resume = {}, {}, None, None
    cfg.trainer.enable_progress_bar, cfg.trainer.num_nodes = False, 1
    if OmegaConf.select(cfg, "data.num_workers") == "auto":
        cfg.data.num_workers = 0
    if strategy_name(cfg.trainer) == "DDP2Strategy":  # Lightning's Tuner refuses it
        kept = ("modules", "whole_inputs", "scalar_outputs")
        dp = {key: value for key, value in cfg.trainer.strategy.items() if key in kept}
        cfg.trainer.strategy = dp | {"_target_": "harness.strategies.dp.DataParallelStrategy"}
    elif strategy_name(cfg.trainer) != "DataParallelStrategy":
        indices = device_indices(cfg.trainer.devices)
        cfg.trainer.strategy, cfg.trainer.devices = "auto", indices[:1] if indices else 1
    choose_gpus(cfg)
    with tempfile.TemporaryDirectory() as folder, user_errors(cfg):
        cfg.run_dir = folder
        try:
            yield run.build(cfg)
        finally:
            run_log.stop()
