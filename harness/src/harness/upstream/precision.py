"""Repair what Lightning 2.6 does with the precision and the device of weights.

- It loads a checkpoint into single precision before it makes the module double, and rounds every
  weight (``harness/tests/checkpoints/test_resume.py``).
- It refuses to clip the gradients of a fused optimizer in bf16-mixed, for the sake of a gradient
  scaler that only 16-mixed has (``harness/tests/knobs/test_precision.py``).
- Its ``WeightAveraging`` puts the trained weights back before the hooks at the end of a validation:
  samples and probes there would show another network than the one that was validated.
- It leaves the average of a run on a GPU on the CPU, makes that of a double module single, and cuts
  off averaged integers (``harness/tests/knobs/test_ema.py``); torch's ``AveragedModel`` reads its
  number of averages from the device at every step (``harness/tests/examples/test_waits.py``).
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

from harness.upstream.hooks import run_last


def double_before_loading(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Make a module double before its weights are loaded; call it in ``setup``."""
    if isinstance(trainer.precision_plugin, DoublePrecision):
        module.double()


def clip_without_scaler(trainer: pl.Trainer) -> None:
    """Clip as in single precision where no scaler has scaled anything."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is None:
        plugin.clip_gradients = partial(Precision.clip_gradients, plugin)  # type: ignore[method-assign]


class Averaging(WeightAveraging):
    """Average a module's parameters, and its buffers of floating point; take other buffers over.

    Args:
        average: changes averaged tensors in place, by the present ones and the number of averages
            before this one. All tensors of a call have one floating type and one device.
    """

    def __init__(self, average: Callable[[Sequence[Tensor], Sequence[Tensor], int], None]) -> None:
        super().__init__(device=None)  # that of the module
        self.average, self.is_swapped = average, False
        self.num_averaged = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the average on the module's device, in its precision."""
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
        """Keep the average until the validation is over."""

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the average as ``state_dict``, also in a validation, where the module has it."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self.is_swapped:
            names = ("current_model_state", "state_dict")
            checkpoint |= zip(names, [checkpoint[name] for name in reversed(names)], strict=True)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the average, and the number of averages in it."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if self._average_model is not None:
            self.num_averaged = int(self._average_model.n_averaged)  # synchronises

    @torch.no_grad()
    def update(self, averaged: AveragedModel, module: pl.LightningModule) -> None:
        """Take a step of the average, as ``AveragedModel`` does, which waits for the device."""
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
