from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from harness.data.randomness import mix, seed_generators

DROPOUTS: tuple[type[nn.Module], ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS += (nn.AlphaDropout, nn.FeatureAlphaDropout)


class SeededSteps(pl.Callback):
    """Seed each training batch's generators by (seed, epoch, batch, rank).

    Dropout then draws the same in a run that was stopped and goes on, with nothing to save; and
    neither validation nor logging can disturb it. An evaluation's batches are seeded by their
    place in the whole loader, which several processes evaluate in turn. About 20 microseconds a
    batch.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed Python, NumPy, torch, and this process's devices."""
        self._seed(pl_module, trainer.current_epoch, batch_idx, trainer.global_rank)

    def _start_evaluation(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seed_evaluation(trainer, pl_module)

    on_validation_start = on_test_start = on_predict_start = _start_evaluation

    def _start_batch(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        place = batch_idx * trainer.world_size + trainer.global_rank
        self._seed_evaluation(trainer, pl_module, dataloader_idx, place)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _start_batch

    def _seed_evaluation(
        self, trainer: pl.Trainer, module: pl.LightningModule, *place: int
    ) -> None:
        # A test draws the same at the end of a training and afterwards; and what no batch of
        # training draws.
        self._seed(module, -1, trainer.global_step * trainer.validating, *place)

    def _seed(self, module: pl.LightningModule, *numbers: int) -> None:
        seed = mix(self.seed, *numbers)
        seed_generators(seed)
        if module.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)


def dropouts(module: nn.Module, switch_off: bool) -> Iterator[str]:
    """The names of what drops units, with their shares; switched off on the way if asked."""
    for name, part in module.named_modules():
        keys = [key for key in vars(part) if "drop" in key.lower()]
        keys += ["p"] if isinstance(part, DROPOUTS) else []
        for key in keys:
            value = getattr(part, key)
            if isinstance(value, float) and 0 < value <= 1:
                yield f"{name or type(part).__name__}.{key}={value:g}"
                if switch_off:
                    setattr(part, key, 0.0)
