"""A small decoder-only transformer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Transformer(nn.Module):
    """A decoder-only transformer, in which each token attends only to earlier tokens.

    It has pre-norm layers and rotary positions (Su et al., "RoFormer", 2021), and ties the input
    and output embeddings. Padding after a text needs no mask, because no token attends to it.

    Args:
        vocab_size: tokens are from 0 to ``vocab_size - 1``.
        length: largest number of tokens of an input.
        width: numbers per token; a multiple of ``2 * num_heads``.
        num_layers: layers of attention and of a fully connected network.
        num_heads: attention heads.
        dropout: probability that an activation is zeroed in training.
    """

    rotation: Tensor

    def __init__(
        self,
        vocab_size: int,
        length: int,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        angles = torch.outer(
            torch.arange(length), 10_000.0 ** -torch.linspace(0, 1, width // num_heads // 2)
        )
        # Not saved in checkpoints, because it is computed from the arguments.
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]), False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:  # as in GPT-2: smaller for layers that add to the residual stream
                depth = 2 * num_layers if name.endswith("out.weight") else 1
                nn.init.normal_(weight, std=0.02 / depth**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, T, vocab_size) of each next token."""
        rotation = self.rotation[:, : tokens.shape[1]]
        x = self.dropout(self.embedding(tokens))  # (B, T, width)
        for layer in self.layers:
            x = layer(x, rotation)
        return F.linear(self.norm(x), self.embedding.weight)


class Layer(nn.Module):
    """Attention and a fully connected network, each added to its input; see ``Transformer``."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape.

        Args:
            x: numbers per token.
            rotation: cosines and sines of each position, shape (2, T, width / num_heads / 2).
        """
        heads = self.attention_in(self.norm1(x)).unflatten(2, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (B, heads, T, width / heads) each
        attended = F.scaled_dot_product_attention(
            rotate(q, rotation),
            rotate(k, rotation),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        x = x + self.drop(self.attention_out(attended.transpose(1, 2).flatten(2)))
        x = x + self.drop(self.mlp_out(F.gelu(self.mlp_in(self.norm2(x)))))
        return x


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs of numbers by angles that grow with the position.

    Args:
        x: shape (..., T, D).
        rotation: cosines and sines, shape (2, T, D / 2).
    """
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
