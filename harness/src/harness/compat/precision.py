"""Fix how Lightning 2.6 treats the precision and the device of weights.

Lightning has these faults:

- Lightning loads a checkpoint in single precision before it converts the module to double. This
  rounds every weight (``harness/tests/checkpoints/test_resume.py``).
- In bf16-mixed, Lightning refuses to clip the gradients of a fused optimizer, because of a gradient
  scaler that only 16-mixed has (``harness/tests/features/test_precision.py``).
- ``WeightAveraging`` restores the trained weights before the hooks at the end of a validation.
  These hooks would see another network than the one that was validated.
- ``WeightAveraging`` keeps the average on the CPU in a run on a GPU, and in single precision for a
  double module. It truncates averaged integers (``harness/tests/features/test_ema.py``).
- torch's ``AveragedModel`` synchronises at every step, to read its number of averages
  (``harness/tests/examples/test_waits.py``).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.plugins import DoublePrecision, MixedPrecision
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from harness.compat.hooks import run_last


def double_before_loading(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Convert a module to double, if the run has that precision. Call it in ``setup``."""
    if isinstance(trainer.precision_plugin, DoublePrecision):
        module.double()


def clip_without_scaler(trainer: pl.Trainer) -> None:
    """Clip gradients as in single precision, if there is no gradient scaler."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is None:
        plugin.clip_gradients = partial(Precision.clip_gradients, plugin)  # type: ignore[method-assign]


class Averaging(WeightAveraging):
    """Average a module's parameters and floating-point buffers; copy its other buffers.

    Args:
        average: updates the averages in place. It gets the averages, the module's tensors, and the
            number of previous updates. All tensors of a call have the same dtype and device.
    """

    def __init__(self, average: Callable[[Sequence[Tensor], Sequence[Tensor], int], None]) -> None:
        super().__init__(device=None)  # use the module's device
        self.average, self.is_swapped = average, False
        self.num_averaged = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Create the average on the module's device, in its precision."""
        double_before_loading(trainer, pl_module)
        pl_module.to(trainer.strategy.root_device)
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            run_last(trainer, "on_validation_end", partial(self._swap_back, trainer, pl_module))
        if self._average_model is not None:
            self._average_model.update_parameters = partial(  # type: ignore[method-assign]
                self.update, self._average_model
            )

    def _swap_back(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.is_swapped:
            WeightAveraging.on_validation_epoch_end(self, trainer, module)
        self.is_swapped = False

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate the average."""
        super().on_validation_epoch_start(trainer, pl_module)
        self.is_swapped = self._average_model is not None

    def on_validation_epoch_end(self, *_: Any) -> None:
        """Do nothing, so that the average stays until ``on_validation_end``."""

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the average as ``state_dict``, also in a validation, when the module holds it."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self.is_swapped:
            names = ("current_model_state", "state_dict")
            checkpoint |= zip(names, [checkpoint[name] for name in reversed(names)], strict=True)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the average and its number of updates."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if self._average_model is not None:
            self.num_averaged = int(self._average_model.n_averaged)  # synchronises

    @torch.no_grad()
    def update(self, averaged: AveragedModel, module: pl.LightningModule) -> None:
        """Update the average as ``AveragedModel`` does, without synchronising."""
        groups = dict[Any, tuple[list[Tensor], list[Tensor]]]()
        pairs = zip(_tensors(averaged.module), _tensors(module), strict=True)
        for average, tensor in pairs:
            is_averaged = average.is_floating_point() or average.is_complex()
            if self.num_averaged and is_averaged:
                group = groups.setdefault((average.dtype, average.device), ([], []))
                group[0].append(average.detach())
                group[1].append(tensor.detach().to(average.device))
            else:
                average.detach().copy_(tensor.detach())
        for averages, tensors in groups.values():
            self.average(averages, tensors, self.num_averaged)
        self.num_averaged += 1
        averaged.n_averaged += 1


def _tensors(module: torch.nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())
