"""A module whose forward writes buffers: some from its samples, some from what all have."""

from typing import Any

import torch
from torch import Tensor

from tests.faults.plain_module import PlainModule


class KeepsQueue(PlainModule):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, 64))
        self.register_buffer("gathered", torch.zeros(4, 64))
        self.register_buffer("num_steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        self.queue.copy_(x[:4])
        self.gathered.copy_(self.all_gather(x[:4])[0])
        self.num_steps += 1
        self.average.lerp_(self.head.bias.detach(), 0.1)
        return super().training_step(batch, batch_idx)
