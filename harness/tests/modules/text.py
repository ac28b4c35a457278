"""A language model, as researchers write it: its loss is a mean over tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import mean_over, sum_over
from tests.modules.classifiers import OneLoss
from tests.modules.data import IGNORED, NUM_WORDS, PADDING


class MaskedLanguage(OneLoss):
    """Declares that its loss is a mean over tokens, or leaves that out."""

    def __init__(self, is_declared: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 8, padding_idx=PADDING)
        self.places = nn.Embedding(10, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, NUM_WORDS)
        self.is_declared = is_declared

    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.layer(x, src_key_padding_mask=ids == PADDING))  # (B, T, vocabulary)

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch["inputs"])
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=IGNORED)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return mean_over(loss, (batch["labels"] != IGNORED).sum()) if self.is_declared else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        num_words = (batch["labels"] != IGNORED).sum()
        self.log("val/loss", self.loss(batch), batch_size=int(num_words))


class ByHand(MaskedLanguage):
    """Manual optimisation."""

    def __init__(self) -> None:
        super().__init__(is_declared=True)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


class Objects(MaskedLanguage):
    """A detector's loss: a sum over all places, divided by the number of objects."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        places = F.softplus(self(batch["ids"]).logsumexp(-1))[batch["ids"] != PADDING]
        return sum_over(places.sum() / 10, (batch["labels"] != IGNORED).sum())
