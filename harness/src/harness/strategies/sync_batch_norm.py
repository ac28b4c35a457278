"""BatchNorm over the samples of all processes, on any device; torch's own refuses CPUs.

``trainer.sync_batchnorm=true`` exchanges the classes of layers; keys and attribute paths stay.
``harness/tests/test_same_experiment.py`` has the proof: two processes end as one.
"""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.plugins.layer_sync import LayerSync
from pytorch_lightning.strategies import ParallelStrategy
from torch import Tensor, nn

from harness.kinds import BATCH_NORMS

SHARES_ALONE = (
    "BatchNorm sees each share alone: not what one device would train. Use strategy=ddp with "
    "trainer.sync_batchnorm=true, GroupNorm, or .eval() for what is frozen."
)
ACCUMULATED = (
    "BatchNorm sees each share alone, where batches are accumulated: not what the whole batch "
    "would train. Use GroupNorm, or .eval() for what is frozen."
)


class SyncBatchNorm(nn.BatchNorm1d):
    """Adds sums up over the processes, which may hold different numbers of samples."""

    is_padding = False  # set for the whole class where this rank has no sample of a batch

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, C, ...) per channel."""
        mean, variance = self.running_mean, self.running_var
        if not self.training:
            affine = (self.weight, self.bias)
            return F.batch_norm(input, mean, variance, *affine, mean is None, eps=self.eps)
        dtype, input = input.dtype, input.to(self.weight.dtype if self.affine else torch.float32)
        dims, shape = [0, *range(2, input.dim())], [1, -1] + [1] * (input.dim() - 2)
        size_here = input.new_full((1,), input.numel() / input.shape[1])  # values per channel
        counts = float(not self.is_padding)  # by which this rank's samples count
        sums: Tensor = _Sum.apply(counts * torch.cat([input.sum(dims), size_here]))  # type: ignore[no-untyped-call]
        centre, size = sums[:-1] / sums[-1], sums[-1].detach()
        centred = input - centre.view(shape)
        spread: Tensor = _Sum.apply(counts * centred.square().sum(dims)) / size  # type: ignore[no-untyped-call]
        if mean is not None and variance is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            mean.lerp_(centre.detach(), share)
            variance.lerp_(spread.detach() * size / (size - 1).clamp(min=1), share)
        normal = centred * (spread.view(shape) + self.eps).rsqrt()
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(dtype)


class _Sum(torch.autograd.Function):
    """All-reduce whose gradients flow back to every process; torch's own is deprecated."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    backward = forward  # the sum of what every process sends back


class SyncBatchNormAnywhere(LayerSync):
    """Lightning's plugin for ``trainer.sync_batchnorm``, for CPUs as well."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Let every BatchNorm look at all processes."""
        self.classes = {m: type(m) for m in model.modules() if isinstance(m, BATCH_NORMS)}
        for module in self.classes:
            module.__class__ = SyncBatchNorm
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Give the layers their classes back."""
        for module, original in self.classes.items():
            module.__class__ = original
        return model


def sees_shares_alone(trainer: pl.Trainer, module: nn.Module) -> str:
    """Return a warning if BatchNorm trains on the share of a device or a process; else nothing."""
    if not trainer.is_global_zero:
        return ""
    synced = (SyncBatchNorm, nn.SyncBatchNorm) if trainer.world_size > 1 else ()
    norms = [p for p in module.modules() if isinstance(p, BATCH_NORMS) and p.training]
    has_alone = any(not isinstance(p, synced) for p in norms)
    if norms and int(trainer.accumulate_grad_batches) > 1:
        return ACCUMULATED
    is_shared = isinstance(trainer.strategy, ParallelStrategy)
    is_several = is_shared and trainer.world_size * trainer.num_devices > 1
    return SHARES_ALONE if is_several and has_alone else ""
