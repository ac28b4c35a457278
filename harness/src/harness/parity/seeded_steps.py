"""The callback that seeds the generators before each batch, and before the user's hooks.

Random numbers depend only on the run's seed and the batch's position. So a resumed run draws the
same numbers without a saved state, and an evaluation does so on any number of ranks.
"""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn

from harness.compat import callbacks_of
from harness.data.randomness import mix_seed, seed_generators
from harness.kinds import FRAMEWORKS, package

DROPOUTS: tuple[type[nn.Module], ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS += (nn.AlphaDropout, nn.FeatureAlphaDropout)


class SeededSteps(pl.Callback):
    """Seed a training batch by (seed, epoch, batch, rank), an evaluation batch by its position.

    The user's hooks around steps, and at an epoch's start and end, draw the same numbers on every
    rank. The position of an evaluation batch is that in the whole loader, although each rank
    evaluates only some of the batches. Neither validation nor logging changes the numbers that
    training draws. Seeding takes about 20 microseconds per batch.

    Args:
        seed: the run's seed.
    """

    seeds_hooks = True  # ``user_hooks.py`` calls its epoch-start hook in a resumed epoch as well

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch off a hook of this callback if the user has no hook of that name to seed."""
        users = [c for c in callbacks_of(trainer) if package(type(c)) not in FRAMEWORKS]
        for hook in ("on_before_optimizer_step", "on_train_batch_end"):
            is_used = is_overridden(hook, pl_module) or any(
                getattr(type(user), hook) is not getattr(pl.Callback, hook) for user in users
            )
            if not is_used:
                vars(self)[hook] = None  # Lightning skips what cannot be called

    def seed_rank(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Give a non-zero rank its own seed for the step, after all hooks of a batch."""
        self._seed(module, trainer.current_epoch, batch_idx, trainer.global_rank)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed all generators for the hooks that follow, the same on every rank."""
        self._seed(pl_module, trainer.current_epoch, -1)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed all generators for the hooks that follow, the same on every rank."""
        self._seed(pl_module, trainer.current_epoch, -2)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed Python, NumPy, torch and this process's devices, alike on every rank."""
        self._seed(pl_module, trainer.current_epoch, batch_idx, 0)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Seed all generators for the hooks that follow, the same on every rank."""
        self._seed(pl_module, trainer.current_epoch, trainer.fit_loop.batch_idx, -1)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Seed all generators for the hooks that follow, the same on every rank."""
        self._seed(pl_module, trainer.current_epoch, batch_idx, -2)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed the hooks before the first batch, and after the last one."""
        self._seed_evaluation(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start
    on_validation_epoch_end = on_test_epoch_end = on_validation_start

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Seed by the batch's position in the whole loader."""
        position = batch_idx * trainer.world_size + trainer.global_rank
        self._seed_evaluation(trainer, pl_module, dataloader_idx, position)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _seed_evaluation(
        self, trainer: pl.Trainer, module: pl.LightningModule, *position: int
    ) -> None:
        # No training epoch has the number -1. A test draws the same numbers in a later command.
        self._seed(module, -1, trainer.global_step * trainer.validating, *position)

    def _seed(self, module: pl.LightningModule, *numbers: int) -> None:
        seed = mix_seed(self.seed, *numbers)
        seed_generators(seed)
        if module.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)
