"""The average of the weights that ``callbacks=ema`` validates, keeps and tests."""

from collections.abc import Sequence

import pytorch_lightning as pl
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from harness.errors import UserError
from harness.upstream.precision import Averaging


class EMA(Averaging):
    """Validate, keep and test an exponential moving average of the weights; train the others.

    After each optimizer step the average moves a share of ``1 - decay`` towards the weights, and
    buffers such as BatchNorm's statistics with them. At first it follows faster, with
    ``(1 + n) / (10 + n)`` after n steps where that is less than ``decay``: otherwise a run of a
    thousand steps would test what is left of its random start.

    In a checkpoint ``state_dict`` is the average, ``current_model_state`` are the weights that go
    on training.
    """

    def __init__(self, decay: float = 0.999) -> None:
        super().__init__(self._follow)
        if not 0 <= decay < 1:
            raise UserError(f"callbacks.ema.decay={decay} must be from 0 to less than 1.")
        self.decay = decay

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the average; half precision is refused, for it rounds away steps of the average."""
        precision = str(trainer.precision)
        if stage == "fit" and precision in ("bf16-true", "16-true"):
            raise UserError(
                f"callbacks.ema: the average would stand still with trainer.precision={precision}. "
                f"Use trainer.precision={precision.replace('true', 'mixed')}."
            )
        super().setup(trainer, pl_module, stage)

    def _follow(self, averages: Sequence[Tensor], tensors: Sequence[Tensor], num: int) -> None:
        decay = min(self.decay, (1 + num) / (10 + num))
        get_ema_multi_avg_fn(decay)(averages, tensors, num)  # type: ignore[no-untyped-call]
