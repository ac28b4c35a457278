from typing import Any, Dict, List, Optional
import numpy as np
import pytorch_lightning as pl
import torch
from torch import nn


class Regression(pl.LightningModule):
    def __init__(self, in_features, hidden=64, lr=1e-3, layers=[]):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.register_buffer("scale", torch.ones(1))

    # half annotated, as it was found
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).squeeze(-1) * self.scale.sum()

    def training_step(self, batch: list, batch_idx: int) -> torch.Tensor:
        x, y = batch
        l = nn.functional.mse_loss(self(x), y)
        self.log("train" + "/loss", l)
        return l

    def configure_optimizers(self):
        unused = 1
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
