from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.plugins.layer_sync import LayerSync
from pytorch_lightning.strategies import ParallelStrategy
from torch import Tensor, nn

from harness.upstream.replication import synchronises_batch_norm

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class SyncBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the samples of all processes, on any device.

    torch's own ``SyncBatchNorm`` is faster but refuses to run on CPUs. Sums are added up by a
    differentiable all-reduce, so processes may hold different numbers of samples.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, C, ...) per channel."""
        if not self.training:
            mean, variance = self.running_mean, self.running_var
            uses_batch = mean is None  # with track_running_stats=False
            return F.batch_norm(
                input, mean, variance, self.weight, self.bias, uses_batch, eps=self.eps
            )
        dtype, input = input.dtype, input.to(self.weight.dtype if self.affine else torch.float32)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        values = input.new_tensor([input.numel() / input.shape[1]])  # per channel
        sums = sum_over_processes(torch.cat([input.sum(dims), values]))
        mean, num_values = sums[:-1] / sums[-1], sums[-1].detach()
        centred = input - mean.view(shape)
        variance = sum_over_processes(centred.square().sum(dims)) / num_values
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach(), share)
            unbiased = variance.detach() * num_values / (num_values - 1).clamp(min=1)
            self.running_var.lerp_(unbiased, share)
        normal = centred * (variance.view(shape) + self.eps).rsqrt()
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(dtype)


def sum_over_processes(values: Tensor) -> Tensor:
    """Add up values of the same shape; gradients flow back to every process."""
    total: Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """torch's own differentiable all-reduce is deprecated."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def sees_shares_alone(trainer: pl.Trainer, module: nn.Module) -> str:
    """What is to be said of BatchNorm that trains on shares; empty where none does."""
    strategy = trainer.strategy
    is_shared = trainer.world_size * trainer.num_devices > 1 and trainer.is_global_zero
    if not isinstance(strategy, ParallelStrategy) or not is_shared:
        return ""
    if synchronises_batch_norm(strategy):
        return ""
    if not any(isinstance(part, BATCH_NORMS) and part.training for part in module.modules()):
        return ""
    way = "" if trainer.world_size > 1 else "strategy=ddp with "
    return (
        "BatchNorm sees each share alone: not what one device would train. "
        f"Use {way}trainer.sync_batchnorm=true, GroupNorm, or .eval() for what is frozen."
    )


class SyncBatchNormAnywhere(LayerSync):
    """``trainer.sync_batchnorm`` for CPUs: every BatchNorm of a module looks at all processes.

    Layers change their class in place, so parameters, keys and attribute paths stay.
    """

    def __init__(self) -> None:
        self.classes: dict[nn.Module, type[nn.Module]] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronise the layers of ``model``."""
        for module in model.modules():
            if isinstance(module, BATCH_NORMS):
                self.classes[module] = type(module)
                module.__class__ = SyncBatchNorm
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Make the layers what they were."""
        for module, its_class in self.classes.items():
            module.__class__ = its_class
        self.classes.clear()
        return model
