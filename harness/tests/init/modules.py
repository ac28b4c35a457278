"""A network with a backbone and a head, as those who fine-tune have."""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import nn

import harness
from tests.modules.classifiers import Classifier


def network(num_classes: int = 3, width: int = 8) -> nn.Sequential:
    backbone = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh())
    parts = {"backbone": backbone, "head": nn.Linear(width, num_classes)}
    return nn.Sequential(OrderedDict(parts))


class FineTuned(Classifier):
    """Trains with groups, under a schedule that sets rates itself."""

    def __init__(self, groups: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.net = network()
        self.groups = groups or {"lr_factors": {"net.backbone": 0.5}, "decay_norms": False}

    def configure_optimizers(self) -> Any:
        optimizer = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
        schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05)
        return harness.build_optimizers(self, optimizer, schedule, groups=self.groups)
