"""Recurrent networks and attention, as researchers write them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.modules.classifiers import OneLoss


class Padded(OneLoss):
    """Learns the target of a padded sequence.

    Forward returns outputs as long as the batch, or as the longest sample that it has seen.
    """

    rate = 0.1

    def __init__(self, has_total_length: bool) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 4)
        self.has_total_length = has_total_length

    def forward(self, x: Tensor, lengths: Any) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        length = x.shape[1] if self.has_total_length else None
        outputs = self.rnn(packed)[0]
        return pad_packed_sequence(outputs, batch_first=True, total_length=length)[0]  # (B, T, 4)

    def loss(self, batch: Any) -> Tensor:
        x, lengths, y = batch
        return F.mse_loss(self.head(self(x, lengths).sum(1)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss


class TimeFirst(OneLoss):
    """As torch's RNNs are by default: time comes before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x)[0])  # (T, B, 4)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])


class Attention(OneLoss):
    """Sees the past through a mask that is made in the step and given to forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0])

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        return F.mse_loss(self(x, mask), y)
