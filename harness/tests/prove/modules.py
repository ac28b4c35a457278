"""Modules with a fault that those of tests/modules do not have."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tests.modules.classifiers import Classifier

SEEN = {"steps": 0}  # of this process alone


class Forgets(Classifier):
    """Counts its steps where no checkpoint looks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SEEN["steps"] += 1
        x, y = batch
        return F.cross_entropy(self(x - 0.1 * SEEN["steps"]), y)


class Crashes(Classifier):
    """Expects the batch of one process."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).view(8, 3), batch[1])
