"""Networks for graphs, as researchers write them: a row of a tensor is a node, not a sample."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.classifiers import OneLoss


class Nodes(OneLoss):
    """Classifies nodes: the loss is a mean over all nodes of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # (nodes, 2)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=len(batch["label"]))


class GraphObjects(Nodes):
    """Reads what PyG's loaders give, and predicts a number for each graph."""

    rate = 0.03

    def forward(self, batch: Any) -> Tensor:
        values = self.net(batch.x)[:, 0]  # (nodes,)
        return values.new_zeros(batch.num_graphs).index_add(0, batch.batch, values)  # (B,)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch), batch.y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=batch.num_graphs)
