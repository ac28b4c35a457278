"""A fully connected network, as a baseline."""

from collections.abc import Sequence

from torch import Tensor, nn


class MLP(nn.Module):
    """A fully connected network.

    Args:
        in_features: numbers per sample; inputs of any shape are flattened.
        hidden: widths of the hidden layers.
        num_classes: width of the output.
        dropout: probability that a hidden activation is zeroed in training.
    """

    def __init__(
        self, in_features: int, hidden: Sequence[int], num_classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(in_features, width), nn.GELU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            in_features = width
        self.layers = nn.Sequential(*layers, nn.Linear(in_features, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ...) to logits of shape (B, num_classes)."""
        logits: Tensor = self.layers(x)
        return logits
