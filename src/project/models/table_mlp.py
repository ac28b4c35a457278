"""A network on numbers and categories."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness import UserError
from project.models.mlp import MLP


class TableMLP(nn.Module):
    """A fully connected network on numbers, and on categories that become learnt vectors.

    A category of n values has a vector of ``min(50, round(1.6 * n ** 0.56))`` numbers, which is the
    rule of fastai (Howard and Gugger, "fastai: A Layered API for Deep Learning", 2020).

    Args:
        in_features: columns of the input; the last ones are codes of categories.
        cardinalities: codes of each category, 0 among them; empty where all are numbers.
        hidden: widths of the hidden layers.
        num_classes: width of the output; 1 for a number.
        dropout: probability that a hidden activation is zeroed in training.
    """

    def __init__(
        self,
        in_features: int,
        cardinalities: Sequence[int],
        hidden: Sequence[int],
        num_classes: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_numbers = in_features - len(cardinalities)
        sizes = [(size, min(50, round(1.6 * size**0.56))) for size in cardinalities]
        self.embeddings = nn.ModuleList(nn.Embedding(*size) for size in sizes)
        width = self.num_numbers + sum(width for _, width in sizes)
        self.mlp = MLP(width, hidden, num_classes, dropout)
        self.largest_code = max(cardinalities, default=1) - 1

    def forward(self, x: Tensor) -> Tensor:
        """Map numbers and codes (B, in_features) to (B, num_classes).

        Without categories, inputs of any shape are flattened.
        """
        if not self.embeddings:
            x = x.flatten(1)
        elif self.largest_code * torch.finfo(x.dtype).eps > 1:
            raise UserError(
                f"{x.dtype} cannot tell categories up to {self.largest_code} apart.\n"
                "Use trainer.precision=bf16-mixed or 16-mixed, which keep inputs as they are."
            )
        numbers, codes = x[:, : self.num_numbers], x[:, self.num_numbers :].long()
        vectors = [table(codes[:, i]) for i, table in enumerate(self.embeddings)]
        outputs: Tensor = self.mlp(torch.cat([numbers, *vectors], dim=1))
        return outputs
