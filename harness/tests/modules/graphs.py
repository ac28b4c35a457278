"""Networks for graphs, as researchers write them: nodes come first, or there is no tensor."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.one_loss import OneLoss


class Convolution(nn.Module):
    """A mean over neighbours, and a linear map."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * num_inputs, num_outputs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        received = torch.zeros_like(x).index_add(0, target, x[source])
        return self.linear(torch.cat([x, received], 1))


class GraphNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Convolution(5, 8), Convolution(8, 8)
        self.head = nn.Linear(8, 1)

    def nodes(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).tanh(), edge_index).tanh()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        nodes, num_graphs = self.nodes(x, edge_index), int(batch.max()) + 1
        sums = nodes.new_zeros(num_graphs, 8).index_add(0, batch, nodes)
        return self.head(sums / batch.bincount().unsqueeze(1)).squeeze(1)  # (B,)


class GraphDicts(OneLoss):
    """Reads a dict, whose first tensor holds all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GraphNetwork()

    def forward(self, batch: Any) -> Tensor:
        return self.net(batch["x"], batch["edge_index"], batch["batch"])

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch), batch["y"])


class GraphObjects(GraphDicts):
    """Reads what PyG's loaders give."""

    def forward(self, batch: Any) -> Tensor:
        assert len(batch.ptr) == batch.num_graphs + 1
        return self.net(batch.x, batch.edge_index, batch.batch)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch), batch.y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), batch_size=batch.num_graphs)


class GraphLists(GraphDicts):
    """Loops over graphs."""

    def forward(self, graphs: Any) -> Tensor:
        whole = [torch.zeros(len(g["x"]), dtype=torch.long, device=g["x"].device) for g in graphs]
        pairs = zip(graphs, whole, strict=True)
        return torch.cat([self.net(g["x"], g["edges"], one) for g, one in pairs])

    def loss(self, graphs: Any) -> Tensor:
        return F.mse_loss(self(graphs), torch.stack([g["y"] for g in graphs]))

    def validation_step(self, graphs: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(graphs), batch_size=len(graphs))


class Nodes(pl.LightningModule):
    """Classifies nodes: the loss is a mean over all nodes of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Convolution(5, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(self.layer(x, edge_index).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["x"], batch["edge_index"]), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, label = self(batch["x"], batch["edge_index"]), batch["label"]
        self.log("val/loss", F.cross_entropy(logits, label), batch_size=len(label))
        self.log("val/acc", (logits.argmax(1) == label).double().mean(), batch_size=len(label))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)
