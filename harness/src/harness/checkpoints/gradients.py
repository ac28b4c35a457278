"""Gradients that wait for a step which their author takes, kept in checkpoints.

Lightning's own steps clear a gradient before it is computed. An author's may accumulate over
batches, or leave in one network what the loss of another has given it.
"""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor

from harness.checkpoints.fingerprints import tensor_sum
from harness.processes.agreement import gather
from harness.shards import parted_like, whole


def waiting(trainer: pl.Trainer, group: Any = None) -> list[dict[str, Tensor]]:
    """The gradients between two batches by parameter, of each process; once where all are equal."""
    module = trainer.lightning_module
    if module.automatic_optimization and not is_overridden("optimizer_zero_grad", module):
        return []
    named = ((name, parameter.grad) for name, parameter in module.named_parameters())
    mine = {name: whole(gradient) for name, gradient in named if gradient is not None}
    if trainer.world_size == 1:
        return [mine]
    print_ = {name: tensor_sum(gradient.cpu()) for name, gradient in mine.items()}
    prints = gather(trainer, print_, group)
    if all(other == prints[0] for other in prints):
        return [mine]
    return gather(trainer, {name: gradient.cpu() for name, gradient in mine.items()}, group)


def put_back(trainer: pl.Trainer, saved: list[dict[str, Tensor]]) -> None:
    """Give the parameters what ``waiting`` has found; another number of processes their mean."""
    if not saved:
        return
    if len(saved) == trainer.world_size:
        mine = saved[trainer.global_rank]
    else:
        names = dict.fromkeys(name for each in saved for name in each)
        found = {name: [each[name] for each in saved if name in each] for name in names}
        mine = {name: sum(all_[1:], all_[0]) / len(saved) for name, all_ in found.items()}
    for name, parameter in trainer.lightning_module.named_parameters():
        if name in mine:
            with torch.no_grad():
                gradient = mine[name].to(parameter.device, copy=True)
                parameter.grad = parted_like(gradient, parameter)
