"""Gradients that wait for a later step; resumed runs are in resume_sweep, "gradients that wait"."""

from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from harness.checkpoints import gradients


class ByHand(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(2, 1)


def trainer_of(module: pl.LightningModule, num_processes: int = 1) -> Any:
    return SimpleNamespace(lightning_module=module, world_size=num_processes, global_rank=0)


def test_each_process_keeps_its_own_where_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ByHand()
    module.net(torch.ones(1, 2)).sum().backward()

    def gather(trainer: Any, value: Any, group: Any) -> list[Any]:
        if any(isinstance(each, torch.Tensor) for each in value.values()):
            return [value, {"net.weight": torch.full((1, 2), 3.0)}]
        return [value, {}]  # the sums

    monkeypatch.setattr(gradients, "gather", gather)
    saved = gradients.waiting(trainer_of(module, 2))
    gradients.put_back(trainer_of(module, 2), saved)
    assert module.net.weight.grad.tolist() == [[1.0, 1.0]]
    # Each of another number of processes takes the mean, which their mean will be.
    gradients.put_back(trainer_of(module, 3), saved)
    assert module.net.weight.grad.tolist() == [[2.0, 2.0]]
    assert module.net.bias.grad.tolist() == [0.5]
