"""Mends Lightning's ``WeightAveraging`` for modules and devices that it was not tried with.

In Lightning 2.6 the average of a run on a GPU stays on the CPU, because it is made before the
module moves; in double precision it is made single; integers, such as positions, are averaged and
cut off. ``harness/tests/knobs/test_ema.py`` fails where a repair is not needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor

from harness.upstream.precision import double_before_loading

PRIVATE = {"pytorch_lightning.callbacks:WeightAveraging()": "_average_model"}


class Averaging(WeightAveraging):
    """Average a module's parameters, and its buffers of floating point; take other buffers over.

    Args:
        average: changes averaged tensors in place, by the present ones and the number of averages
            before this one. All tensors of a call have one floating type and one device.
    """

    def __init__(self, average: Callable[[Sequence[Tensor], Sequence[Tensor], int], None]) -> None:
        super().__init__(device=None, multi_avg_fn=self.mix)  # None: the device of the module
        self.average = average

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the average on the module's device, in its precision."""
        double_before_loading(trainer, pl_module)
        pl_module.to(trainer.strategy.root_device)
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            # Each step reads the number, and no step should wait for the device.
            self._average_model.n_averaged = self._average_model.n_averaged.cpu()

    @torch.no_grad()
    def mix(self, averages: list[Tensor], tensors: list[Tensor], _: Any) -> None:
        """Take a step of the average, for tensors of one type and device."""
        if averages[0].is_floating_point() or averages[0].is_complex():
            assert self._average_model is not None
            self.average(averages, tensors, int(self._average_model.n_averaged))
        else:
            for average, tensor in zip(averages, tensors, strict=True):
                average.copy_(tensor)
