"""Callbacks that do harm to a run, at one step and on one rank."""

import os
import signal
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor


def disturb(**settings: Any) -> list[str]:
    """Words of a command that add the callback."""
    words = [f"+callbacks.disturb.{key}={value}" for key, value in settings.items()]
    return [f"+callbacks.disturb._target_={__name__}.Disturb", *words]


class Disturb(pl.Callback):
    """Do harm at one step.

    Args:
        what: ``drift`` changes one number of a tensor by its last bit, in one process alone;
            ``batch``, ``gradient`` puts a value that is not finite there; ``error`` raises one;
            ``kill`` kills the process.
        name: of the parameter or buffer.
        step: in which.
        rank: of the process; ``None`` for all.
        value: what is put there.
    """

    def __init__(
        self, what: str, name: str = "", step: int = 3, rank: int | None = 0, value: str = "nan"
    ) -> None:
        self.what, self.name, self.step, self.rank = what, name, step, rank
        self.value = float(value)

    def is_now(self, trainer: pl.Trainer) -> bool:
        return trainer.global_step == self.step and self.rank in (None, trainer.global_rank)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.what == "batch" and self.is_now(trainer):
            batch[0][0] = self.value

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        if self.what == "error" and self.is_now(trainer):
            raise ValueError("of a mistake")
        if self.what == "kill" and self.is_now(trainer):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "drift" and self.is_now(trainer):
            tensors = dict([*pl_module.named_parameters(), *pl_module.named_buffers()])
            values = tensors[self.name].data.view(-1)
            values[-1] = torch.nextafter(values[-1], torch.tensor(100.0))

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.what == "gradient" and self.is_now(trainer):
            gradient = dict(pl_module.named_parameters())[self.name].grad
            assert gradient is not None
            gradient.view(-1)[-1] = self.value
