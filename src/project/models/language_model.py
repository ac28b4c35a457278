"""Train language models: the loss of the next token, its metrics, and continuation of texts."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from harness import Mean, build_optimizers, is_logged, mean_over

IGNORED = -100  # the label of padding


class LanguageModel(pl.LightningModule):
    """Train a network to predict the next token of a text.

    Losses are means over tokens, in nats. A batch has inputs and labels of shape (B, T). Labels of
    -100 are ignored.

    Args:
        net: maps tokens (B, T) to logits (B, T, vocab_size) of each next token.
        optimizer, scheduler, scheduler_interval, scheduler_monitor, groups: see
            ``harness.build_optimizers``.
        bytes_per_token: mean number of bytes of a token. With it, evaluations log bits_per_byte,
            by which models with different tokenizers can be compared. ``None`` does not log it.
        num_continued: number of tokens by which predictions continue each text; 0 for none.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., Any] | None = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        scheduler_monitor: str = "val/loss",
        groups: Mapping[str, Any] | None = None,
        bytes_per_token: float | None = None,
        num_continued: int = 0,
    ) -> None:
        super().__init__()
        # Only numbers, so that a checkpoint loads without this code.
        self.save_hyperparameters("bytes_per_token")
        self.net = net
        self.training_plan = optimizer, scheduler, scheduler_interval, scheduler_monitor
        self.groups = groups
        self.bytes_per_token, self.num_continued = bytes_per_token, num_continued
        self.train_loss, self.val_loss, self.test_loss = Mean(), Mean(), Mean()

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, T) to logits (B, T, vocab_size)."""
        logits: Tensor = self.net(tokens)
        return logits

    def mean_loss(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a batch's tokens, and their number."""
        tokens, labels = batch
        num_tokens = (labels != IGNORED).sum()
        return token_losses(self(tokens), labels).sum() / num_tokens, num_tokens

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the batch's tokens."""
        loss, num_tokens = self.mean_loss(batch)
        loss = mean_over(loss, num_tokens)
        self.train_loss.update(loss.detach(), num_tokens)
        if is_logged(self, batch_idx):
            # The mean over the tokens of all ranks since the last logged step.
            self.log("train/loss", self.train_loss.compute(), prog_bar=True)
            self.train_loss.reset()
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Update the mean loss with one batch."""
        self.val_loss.update(*self.mean_loss(batch))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Update the mean loss with one batch."""
        self.test_loss.update(*self.mean_loss(batch))

    def on_validation_epoch_end(self) -> None:
        """Log loss, perplexity and bits per byte over all tokens of all ranks."""
        self._log_metrics("val", self.val_loss)

    def on_test_epoch_end(self) -> None:
        """Log loss, perplexity and bits per byte over all tokens of all ranks."""
        self._log_metrics("test", self.test_loss)

    def _log_metrics(self, split: str, mean_loss: Mean) -> None:
        loss = mean_loss.compute()  # over all ranks
        self.log(f"{split}/loss", loss, prog_bar=True)
        self.log(f"{split}/perplexity", loss.exp())
        if self.bytes_per_token is not None:
            self.log(f"{split}/bits_per_byte", loss / math.log(2) / self.bytes_per_token)
        mean_loss.reset()

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Any]:
        """Return the columns of a table: loss, perplexity and continuation of each text."""
        tokens, labels = batch
        losses = token_losses(self(tokens), labels)  # (B, T)
        num_tokens = (labels != IGNORED).sum(dim=1)
        loss = losses.sum(dim=1) / num_tokens
        columns: dict[str, Any] = {"tokens": num_tokens, "loss": loss, "perplexity": loss.exp()}
        if self.num_continued:
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            # A text has as many inputs as labels: its tokens, and the token before them.
            lengths = num_tokens.clamp(max=tokens.shape[1])
            continued = continue_texts(self.net, tokens, lengths, self.num_continued)
            columns["continuation"] = [data.tokenizer.decode(ids) for ids in continued.tolist()]
        return columns

    def configure_optimizers(self) -> Any:
        """Build the optimizer and the scheduler that the config sets."""
        return build_optimizers(self, *self.training_plan, groups=self.groups)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token, shape (B, T); 0 for ignored labels."""
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view_as(labels)


@torch.no_grad()
def continue_texts(
    net: nn.Module,
    tokens: Tensor,
    lengths: Tensor,
    num_tokens: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue texts with the tokens that a network predicts, one after another.

    Args:
        net: maps tokens (B, T) to logits (B, T, vocab_size).
        tokens: windows whose rows begin with a text, shape (B, T).
        lengths: number of tokens of each text, from 1 to T, shape (B,).
        num_tokens: number of tokens to add; for each, a full window drops its first token.
        temperature: 0 selects the most likely token; 1 samples from the network's distribution.
        generator: random generator on the CPU.

    Returns:
        The added tokens, shape (B, num_tokens).
    """
    rows, added = torch.arange(len(tokens), device=tokens.device), []
    for _ in range(num_tokens):
        logits = net(tokens)[rows, lengths - 1].float()  # (B, vocab_size)
        if temperature:
            probabilities = (logits / temperature).softmax(dim=1).cpu()
            drawn = torch.multinomial(probabilities, 1, generator=generator)[:, 0].to(tokens.device)
        else:
            drawn = logits.argmax(dim=1)
        is_full = lengths == tokens.shape[1]
        tokens = torch.where(is_full[:, None], tokens.roll(-1, dims=1), tokens)
        lengths = torch.where(is_full, lengths, lengths + 1)
        tokens = tokens.index_put((rows, lengths - 1), drawn)
        added.append(drawn)
    return torch.stack(added, dim=1)
