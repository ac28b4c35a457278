"""Names that a project uses; everything else is internal to the harness.

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
- ``num_ranks``, ``num_devices``: how many processes and devices a run has, where
  ``trainer.world_size`` is 1: in ``setup``, ``*_dataloader`` and ``configure_optimizers``.
- ``parameter_groups``: learning rates of parts and by depth, for any ``configure_optimizers``.
- ``Mean``: a weighted mean that is cheap enough for every training step.
- ``mean_over``: says that a loss is a mean over tokens, nodes or weights, not over samples;
  ``sum_over``: divides a sum by a number, such as objects, both of the whole batch.
- ``is_logged``: whether Lightning writes what is logged at this step.
- ``Picture``: what a test looked like, in TensorBoard; its mistakes do not stop a run.
- ``UserError``: a mistake that is shown in a line, without a traceback.

Names are imported on first use: ``from harness import main`` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.processes.parent import follow_parent
from harness.upstream import lightning_name

if TYPE_CHECKING:
    from harness.command.compose import compose
    from harness.command.from_python import Run, evaluate, load_run, predict, train
    from harness.command.main import main
    from harness.data.batches import Batch, BatchedDataset
    from harness.data.caching import cached
    from harness.data.datamodule import DataModule
    from harness.data.randomness import uniform
    from harness.data.splits import SplitDataModule
    from harness.errors import UserError
    from harness.exact.mean_over import mean_over, sum_over
    from harness.exact.self_log import Mean, is_logged
    from harness.optimizers import build_optimizers, parameter_groups
    from harness.upstream.one_rank import num_devices, num_ranks
    from harness.watch.picture import Picture

__all__ = [
    "Batch", "BatchedDataset", "DataModule", "Mean", "Picture", "Run", "SplitDataModule",
    "UserError", "build_optimizers", "cached", "compose", "evaluate", "is_logged", "load_run",
    "main", "mean_over", "num_devices", "num_ranks", "parameter_groups", "predict", "sum_over",
    "train", "uniform",
]  # fmt: skip
_MODULES = {
    "command.compose": ["compose"],
    "command.from_python": ["Run", "evaluate", "load_run", "predict", "train"],
    "command.main": ["main"],
    "data.batches": ["Batch", "BatchedDataset"],
    "data.caching": ["cached"],
    "data.datamodule": ["DataModule"],
    "data.randomness": ["uniform"],
    "data.splits": ["SplitDataModule"],
    "errors": ["UserError"],
    "exact.mean_over": ["mean_over", "sum_over"],
    "exact.self_log": ["Mean", "is_logged"],
    "optimizers": ["build_optimizers", "parameter_groups"],
    "upstream.one_rank": ["num_devices", "num_ranks"],
    "watch.picture": ["Picture"],
}

follow_parent()  # first, because the imports below take seconds in which a parent may end
lightning_name.install()  # early: whoever imports lightning.pytorch gets pytorch_lightning


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"harness has no {name}; it has {', '.join(__all__)}.")
    value = globals()[name] = getattr(import_module(f"harness.{module}"), name)
    return value
