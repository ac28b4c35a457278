"""``callbacks=ema``: an exponential moving average of the weights."""

from collections.abc import Sequence

import pytorch_lightning as pl
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from harness.compat.precision import Averaging
from harness.errors import UserError


class EMA(Averaging):
    """Keep an exponential moving average of the weights, for validation, checkpoints and tests.

    Each optimizer step sets ``average = decay * average + (1 - decay) * weights``, also for buffers
    such as BatchNorm's statistics. After n steps the decay is at most ``(1 + n) / (10 + n)``:
    otherwise a run of a thousand steps would test mostly its initial weights. The average itself is
    not trained.

    In a checkpoint ``state_dict`` is the average, and ``current_model_state`` are the weights with
    which training continues.
    """

    def __init__(self, decay: float = 0.999) -> None:
        super().__init__(self._follow)
        if not 0 <= decay < 1:
            raise UserError(f"callbacks.ema.decay={decay} must be at least 0 and less than 1.")
        self.decay = decay

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Create the average.

        Raises:
            UserError: the precision is 16-bit, which would round the average's small steps to 0.
        """
        precision = str(trainer.precision)
        if stage == "fit" and precision in ("bf16-true", "16-true"):
            raise UserError(
                f"callbacks=ema: trainer.precision={precision} rounds the average's steps to 0.\n"
                f"Use trainer.precision={precision.replace('true', 'mixed')}."
            )
        super().setup(trainer, pl_module, stage)

    def _follow(self, averages: Sequence[Tensor], tensors: Sequence[Tensor], num: int) -> None:
        decay = min(self.decay, (1 + num) / (10 + num))
        get_ema_multi_avg_fn(decay)(averages, tensors, num)  # type: ignore[no-untyped-call]
