"""A fully connected network on numerical and categorical columns."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harness import UserError
from project.models.mlp import MLP


class TableMLP(nn.Module):
    """A fully connected network on numbers and on embeddings of categories.

    The embedding of a column with n values has ``min(50, round(1.6 * n ** 0.56))`` numbers, by the
    rule of fastai (Howard and Gugger, "fastai: A Layered API for Deep Learning", 2020).

    Args:
        in_features: columns of the input; the last columns hold codes of categories.
        cardinalities: number of codes of each categorical column, code 0 included; may be empty.
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

        Without categorical columns, inputs of any shape are flattened.
        """
        if not self.embeddings:
            x = x.flatten(1)
        elif self.largest_code * torch.finfo(x.dtype).eps > 1:
            raise UserError(
                f"Inputs in {x.dtype} round the codes of categories, which go up to "
                f"{self.largest_code}.\n"
                "Use trainer.precision=bf16-mixed or 16-mixed, which keep inputs in float32."
            )
        numbers, codes = x[:, : self.num_numbers], x[:, self.num_numbers :].long()
        vectors = [table(codes[:, i]) for i, table in enumerate(self.embeddings)]
        outputs: Tensor = self.mlp(torch.cat([numbers, *vectors], dim=1))
        return outputs
