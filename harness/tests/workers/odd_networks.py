"""Networks of one linear layer whose forward does what some programs cannot."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Odd(nn.Module):
    """Logits of flattened inputs.

    Args:
        in_features: of an input.
        num_classes: of the output.
    """

    kind = "plain"  # what forward does besides; tests exchange it

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(in_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ...) to (B, num_classes)."""
        logits: Tensor = self.layer(x.flatten(1))
        match self.kind:
            case "decides":
                return logits if logits.sum() > 0 else -logits
            case "fixed size":
                return torch.stack([row * 2 for row in logits])
            case "squeezes":
                return F.pad(logits, (0, 1)).squeeze()[..., :-1]
            case "draws":
                return logits + torch.rand_like(logits)
            case "not in ONNX":
                return logits + torch.linalg.eigvalsh(logits.T @ logits)
        return logits
