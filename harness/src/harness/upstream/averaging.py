"""Mends Lightning's ``WeightAveraging`` for modules and devices that it was not tried with.

In Lightning 2.6 the average of a run on a GPU stays on the CPU, because it is made before the
module moves, and all weights travel at every step; in double precision it may be made single. It
averages integers, such as positions, and cuts off the fraction: 3 becomes 2.9999998, and 2.
``harness/tests/knobs/test_ema.py`` fails where a repair is not needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor

from harness.upstream.resume_states import repair_precision

PRIVATE = {"pytorch_lightning.callbacks:WeightAveraging()": "_device _average_model"}


class Averaging(WeightAveraging):
    """Average a module's parameters, and its buffers of floating point; take other buffers over.

    Args:
        average: changes averaged tensors in place, by the present ones and the number of averages
            before this one. All tensors of a call have one floating type and one device.
    """

    def __init__(self, average: Callable[[Sequence[Tensor], Sequence[Tensor], int], None]) -> None:
        super().__init__(multi_avg_fn=self.mix)
        self.average = average

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the average where the module will be, in its precision."""
        repair_precision(trainer, pl_module)
        self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            # The number is looked at in each step, and no step should wait for the device.
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
