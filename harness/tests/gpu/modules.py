"""Networks and callbacks of the cases that a GPU alone can show."""

import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn


class Wrong(nn.Module):
    """A linear layer with an unintended effect on a GPU."""

    def __init__(self, in_features: int, num_classes: int, what: str, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(in_features, width), nn.ReLU(), nn.Linear(width, num_classes)
        )
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        if self.what == "hungry":
            torch.empty(2**50, dtype=torch.uint8, device=x.device)
        elif self.what == "elsewhere":
            logits = logits * torch.ones(logits.shape)
        elif self.what == "spoilt":
            logits = logits * torch.nan
        return logits


def wrong(what: str, *more: str) -> list[str]:
    """Words of a command with that network."""
    target = f"model.net._target_={__name__}.Wrong"
    return [target, f"+model.net.what={what}", "~model.net.hidden", "~model.net.dropout", *more]


class Memory(pl.Callback):
    """Write the device's memory: the peak so far, and what is alive after each of six steps."""

    def __init__(self, path: str) -> None:
        self.path, self.alive = Path(path), list[int]()

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        is_cuda = module.device.type == "cuda"
        if len(self.alive) < 6:
            self.alive.append(torch.cuda.memory_allocated() if is_cuda else 0)
            peak = torch.cuda.max_memory_allocated() if is_cuda else 0
            self.path.write_text(json.dumps({"alive": self.alive, "peak": peak}))
