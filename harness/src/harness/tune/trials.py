"""Try settings of an experiment in one process, without a run.

In: a composed config. Out: a line to paste. It holds for several processes, because training is the
same under every strategy.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from pytorch_lightning.tuner.tuning import Tuner

from harness.command.check import check
from harness.command.compose import compose_command
from harness.command.main import choose_gpus
from harness.data.datamodule import DataModule
from harness.errors import UserError
from harness.run import build as run
from harness.run import log_file as run_log
from harness.run.build import make
from harness.run.mistakes import user_errors
from harness.strategies.launchable import device_indices, num_processes, strategy_name

SMALLEST, LARGEST = 2, 8192  # Lightning's search for a batch size ends there
NUM_STEPS = 100  # of the search for a learning rate


def composed(overrides: Sequence[str]) -> Any:
    """Compose and check the config of a training command.

    Raises:
        UserError: with what to type instead.
    """
    command = compose_command("train", list(overrides), "conf")
    check(command)
    return OmegaConf.create(OmegaConf.to_container(command.cfg, resolve=True))


def tune_workers(cfg: Any) -> str:
    """Measure reading the training data with 0, 1, 2, 4, … workers per process.

    Raises:
        UserError: if the data is not a ``harness.DataModule``.
    """
    with user_errors():
        data = own_data(None if cfg.data is None else make(cfg.data), "workers")
        nodes = cfg.trainer.num_nodes
        return f"data.num_workers={data.choose_workers('train', num_processes(cfg.trainer), nodes)}"


def tune_batch_size(cfg: Any) -> str:
    """Double the batch of one process until memory, the data set, or the search's range ends it.

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
        size = Tuner(trainer).scale_batch_size(
            model, datamodule=data, init_val=SMALLEST, max_val=largest + 1
        )
    if not size or size < SMALLEST:
        raise UserError("Not even a batch of two samples fits in memory: use a smaller model.")
    if size > largest:  # Lightning has doubled once more without trying
        size //= 2
    more = f"{2 * size} do not" if 2 * size <= largest else "memory is no limit"
    print(f"{size} samples fit in each process; {more}.")
    return f"data.batch_size={min(size * num_ranks, num_samples)}"


def tune_learning_rate(cfg: Any) -> str:
    """Train 100 steps at growing rates, and take the one at which the loss falls the fastest.

    Raises:
        UserError: where the losses show no fall.
    """
    cfg.trainer.max_steps, cfg.trainer.max_epochs = -1, NUM_STEPS + 2  # at least a step in each
    with one_process(cfg) as (trainer, model, data):
        finder: Any = Tuner(trainer).lr_find(
            model, datamodule=data, min_lr=1e-6, num_training=NUM_STEPS, update_attr=False
        )
    suggestion = finder.suggestion()
    if suggestion is None:
        raise UserError("The loss falls at no rate from 1e-6 to 1: is the loss right?")
    picture = Figure(figsize=(6, 4), layout="constrained")
    finder.plot(suggest=True, ax=picture.add_subplot(title="Loss at growing learning rates"))
    path = Path(cfg.output_dir, "tune", "lr.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150)
    print(f"picture: {path}")
    return f"model.optimizer.lr={suggestion:.2g}"


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
