"""Recurrent networks and attention, as researchers write them."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.modules.one_loss import OneLoss


class PaddedSums(pl.LightningModule):
    """Learns the target of a padded sequence; forward gives one row for each."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.head(self.padded(x, lengths).sum(1))  # (B, 4)

    def padded(self, x: Any, lengths: Any, total_length: int | None = None) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs = self.rnn(packed)[0]
        return pad_packed_sequence(outputs, batch_first=True, total_length=total_length)[0]

    def loss(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x, lengths), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(*batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnLongest(PaddedSums):
    """Returns outputs that are as long as the longest sample that forward has seen."""

    def forward(self, x: Tensor, lengths: Any) -> Any:
        return self.padded(x, lengths)  # (B, T of these, 4)

    def loss(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self(x, lengths).sum(1)), y)


class TotalLength(OwnLongest):
    def forward(self, x: Tensor, lengths: Any) -> Any:
        return self.padded(x, lengths, total_length=x.shape[1])


class ListOfLengths(PaddedSums):
    def loss(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x, lengths.tolist()), y)


class Packed(PaddedSums):
    """Takes a packed batch and returns one."""

    def forward(self, packed: Any) -> Any:
        return self.rnn(packed)[0]

    def loss(self, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        outputs, found = pad_packed_sequence(self(packed), batch_first=True)
        assert torch.equal(found, lengths)
        return F.mse_loss(self.head(outputs.sum(1)), y)


class TimeFirst(PaddedSums):
    """As torch's RNNs are by default: time comes before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x)[0])  # (T, B, 4)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y)


class Attention(OneLoss):
    """Sees the past through a mask that is made in the step and given to forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0])

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        return F.mse_loss(self(x, mask), y)
