"""Language models, as researchers write them: their losses are means over words."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.data import IGNORED, NUM_WORDS, PADDING
from tests.modules.one_loss import OneLoss


class MaskedLanguage(OneLoss):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 8, padding_idx=PADDING)
        self.places = nn.Embedding(10, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, NUM_WORDS)

    def features(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.layer(x, src_key_padding_mask=ids == PADDING)  # (B, T, 8)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.features(ids))

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch["inputs"])
        return F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=IGNORED)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        num_words = (batch["labels"] != IGNORED).sum()
        self.log("val/loss", self.loss(batch), batch_size=int(num_words))


class SafeMean(MaskedLanguage):
    """A mean that is zero, and not NaN, where nothing is masked."""

    def loss(self, batch: Any) -> Tensor:
        logits, labels = self(batch["inputs"]).transpose(1, 2), batch["labels"]
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum().clamp(min=1)
