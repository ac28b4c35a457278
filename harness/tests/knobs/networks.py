"""Networks of the tests of knobs."""

import torch
from torch import Tensor, nn


class WithBuffers(nn.Module):
    """BatchNorm's statistics, and buffers that nothing may average: integers and truth values."""

    def __init__(self, in_features: int, num_classes: int, num_hidden: int = 8) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Flatten(), nn.Linear(in_features, num_hidden), nn.BatchNorm1d(num_hidden)
        )
        self.second = nn.Linear(num_hidden, num_classes)
        self.register_buffer("positions", torch.arange(num_hidden))
        self.register_buffer("is_kept", torch.arange(num_hidden) > 0)
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ...) to logits (B, num_classes)."""
        hidden = self.first(x)[:, self.positions] * self.is_kept * self.scale
        logits: Tensor = self.second(hidden.relu())
        return logits
