"""What a project uses of the machinery that trains it; everything else is the harness's own.

Commands and notebooks:

- ``main``: the whole of ``train.py``, ``evaluate.py`` and ``predict.py``.
- ``train``, ``evaluate``, ``predict``: the same from Python; each returns a ``Run``.
- ``compose``: the config that words such as ``"model=mlp"`` make.
- ``load_run``: a run's config, results, metrics and model, from its folder.

Data:

- ``DataModule``: loaders whose batches mean the same under every strategy.
- ``BatchedDataset``: a data set that reads whole batches; ``Batch``: the indices of one.
- ``SplitDataModule``: a ``DataModule`` that draws its splits from one set of samples.
- ``uniform``: random numbers that depend on (seed, epoch, sample) alone.
- ``cached``: a file or folder that one process makes once, whole or not at all.

Modules and callbacks:

- ``build_optimizers``: the body of ``configure_optimizers``, from an optimizer and a scheduler
  that a YAML file gives.
- ``parameter_groups``: learning rates of parts and by depth, for any ``configure_optimizers``.
- ``Mean``: a weighted mean that is cheap enough for every training step.
- ``mean_over``: says that a loss is a mean over tokens, nodes or weights, not over samples;
  ``sum_over``: divides a sum by a number, such as objects, both of the whole batch.
- ``is_logged``: whether Lightning writes what is logged at this step.
- ``Picture``: what a test looked like, in TensorBoard; its mistakes cost a run nothing.
- ``UserError``: a mistake that is told in a line, without a traceback.

Names are imported when they are used: ``from harness import main`` does not import torch.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.processes.launch import follow_parent
from harness.quick_imports import quick_imports
from harness.upstream import lightning_name

if TYPE_CHECKING:
    from harness.command.compose import compose
    from harness.command.from_python import Run, evaluate, load_run, predict, train
    from harness.command.main import main
    from harness.data.batches import Batch, BatchedDataset
    from harness.data.caching import cached
    from harness.data.datamodule import DataModule
    from harness.data.randomness import uniform
    from harness.data.split_datamodule import SplitDataModule
    from harness.errors import UserError
    from harness.exact.mean_metric import Mean, is_logged
    from harness.exact.mean_over import mean_over, sum_over
    from harness.groups import parameter_groups
    from harness.optimizers import build_optimizers
    from harness.watch.picture import Picture

__all__ = [
    "Batch",
    "BatchedDataset",
    "DataModule",
    "Mean",
    "Picture",
    "Run",
    "SplitDataModule",
    "UserError",
    "build_optimizers",
    "cached",
    "compose",
    "evaluate",
    "is_logged",
    "load_run",
    "main",
    "mean_over",
    "parameter_groups",
    "predict",
    "sum_over",
    "train",
    "uniform",
]

_MODULES = {
    "Batch": "data.batches",
    "BatchedDataset": "data.batches",
    "DataModule": "data.datamodule",
    "Mean": "exact.mean_metric",
    "Picture": "watch.picture",
    "Run": "command.from_python",
    "SplitDataModule": "data.split_datamodule",
    "UserError": "errors",
    "build_optimizers": "optimizers",
    "cached": "data.caching",
    "compose": "command.compose",
    "evaluate": "command.from_python",
    "is_logged": "exact.mean_metric",
    "load_run": "command.from_python",
    "main": "command.main",
    "mean_over": "exact.mean_over",
    "parameter_groups": "groups",
    "predict": "command.from_python",
    "sum_over": "exact.mean_over",
    "train": "command.from_python",
    "uniform": "data.randomness",
}

follow_parent()  # whose end is otherwise not noticed while all else is imported
lightning_name.install()  # early: whoever imports lightning.pytorch gets pytorch_lightning


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"harness has no {name}; it has {', '.join(__all__)}.")
    with interruptible(name == "main"), quick_imports():
        value = globals()[name] = getattr(import_module(f"harness.{_MODULES[name]}"), name)
    return value


@contextmanager
def interruptible(is_command: bool) -> Iterator[None]:
    """Let Ctrl-C end a command without a traceback of what it was importing."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (is_command and is_default and threading.current_thread() is threading.main_thread()):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
