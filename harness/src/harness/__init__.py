"""The public names of the library; everything else is internal.

Commands and notebooks:

- ``main``: the entry point of ``train.py``, ``evaluate.py`` and ``predict.py``.
- ``train``, ``evaluate``: the same from Python; each returns a ``Run``.
- ``predict``: the same from Python; it returns the path of the predictions.
- ``compose``: the config for overrides such as ``"model=mlp"``.
- ``load_run``: a run's config, results, metrics and model, from its folder.

Data:

- ``DataModule``: builds loaders whose global batches are the same under every strategy.
- ``BatchedDataset``: a data set that reads whole batches; ``Batch``: the indices of one batch.
- ``SplitDataModule``: a ``DataModule`` that draws its splits from one set of samples.
- ``uniform``: random numbers that depend only on (seed, epoch, sample).
- ``cached``: a file or folder that one process creates once, complete or not at all.

Modules and callbacks:

- ``build_optimizers``: the body of ``configure_optimizers``, for an optimizer and a scheduler
  from a YAML file.
- ``num_ranks``, ``num_devices``: the number of ranks and devices of a run. Use them in ``setup``,
  ``*_dataloader`` and ``configure_optimizers``, where ``trainer.world_size`` is 1.
- ``parameter_groups``: a learning rate per submodule, for ``configure_optimizers``.
- ``Mean``: a weighted mean that is cheap enough for every training step.
- ``mean_over``: marks a loss that averages over tokens, nodes or weights instead of samples;
  ``sum_over``: divides a sum by a count, such as that of objects, both over the global batch.
- ``is_logged``: whether Lightning writes the values that are logged at this step.
- ``Picture``: an image of test results in TensorBoard; its errors do not stop a run.
- ``UserError``: an error in a command or config, which is printed without a traceback.

Names are imported on first use: ``from harness import main`` does not import torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.compat import lightning_name
from harness.distributed.parent_process import follow_parent

if TYPE_CHECKING:
    from harness.command.compose import compose
    from harness.command.from_python import Run, evaluate, load_run, predict, train
    from harness.command.main import main
    from harness.compat.one_rank import num_devices, num_ranks
    from harness.data.batches import Batch, BatchedDataset
    from harness.data.caching import cached
    from harness.data.datamodule import DataModule
    from harness.data.randomness import uniform
    from harness.data.splits import SplitDataModule
    from harness.errors import UserError
    from harness.monitoring.picture import Picture
    from harness.optimizers import build_optimizers, parameter_groups
    from harness.parity.log_often import Mean, is_logged
    from harness.parity.mean_over import mean_over, sum_over

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
    "parity.mean_over": ["mean_over", "sum_over"],
    "parity.log_often": ["Mean", "is_logged"],
    "optimizers": ["build_optimizers", "parameter_groups"],
    "compat.one_rank": ["num_devices", "num_ranks"],
    "monitoring.picture": ["Picture"],
}

follow_parent()  # first: the parent may end during the imports below, which take seconds
lightning_name.install()  # early, so that ``import lightning.pytorch`` gives pytorch_lightning


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"harness has no {name}; it has {', '.join(__all__)}.")
    try:
        value = globals()[name] = getattr(import_module(f"harness.{module}"), name)
    except KeyboardInterrupt:
        if name != "main":
            raise
        print("Interrupted before the run started.", file=sys.stderr)  # train.py imports main first
        sys.exit(130)
    return value
