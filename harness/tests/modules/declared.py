"""Modules that say what their losses are means over: the one line that makes them exact."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from harness import mean_over, sum_over
from tests.modules import classifiers, graphs, text
from tests.modules.data import IGNORED, PADDING


class ClassWeights(classifiers.ClassWeights):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return mean_over(loss, self.loss.weight[batch[1]].sum())


class MaskedLanguage(text.MaskedLanguage):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mean_over(self.loss(batch), (batch["labels"] != IGNORED).sum())


class SafeMean(text.SafeMean):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mean_over(self.loss(batch), (batch["labels"] != IGNORED).sum())


class Nodes(graphs.Nodes):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["x"], batch["edge_index"]), batch["label"])
        return mean_over(loss, len(batch["label"]))


class SumOfLosses(classifiers.SumOfLosses):
    """Processes are averaged, and their sums must not be."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return sum_over(loss)


class Objects(text.MaskedLanguage):
    """A detector's loss: a sum over all places, divided by the number of objects."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        places = F.softplus(self(batch["ids"]).logsumexp(-1))[batch["ids"] != PADDING]
        return sum_over(places.sum() / 10, (batch["labels"] != IGNORED).sum())


class ByHand(text.MaskedLanguage):
    """Manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        num_words = (batch["labels"] != IGNORED).sum()
        self.manual_backward(mean_over(self.loss(batch), num_words))
        optimizer.step()
        optimizer.zero_grad()
