"""BatchNorm over the samples of all ranks, on any device; torch's own version refuses CPUs.

``trainer.sync_batchnorm=true`` replaces the layers' class, so keys and attribute paths stay.
``harness/tests/test_same_experiment.py`` shows that two ranks train as one.
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

LOCAL_BATCH = (
    "BatchNorm sees only the local batch, so training differs from that on one device. Use "
    "strategy=ddp with trainer.sync_batchnorm=true, or GroupNorm, or .eval() if it is frozen."
)
ACCUMULATED = (
    "BatchNorm sees only the local batch when batches are accumulated, so training differs from "
    "that with the whole batch. Use GroupNorm, or .eval() if it is frozen."
)


class SyncBatchNorm(nn.BatchNorm1d):
    """BatchNorm that sums over all ranks, which may have different numbers of samples."""

    is_padding = False  # set on the class while this rank has no sample of the global batch

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, C, ...) per channel."""
        mean, variance = self.running_mean, self.running_var
        if not self.training:
            affine = (self.weight, self.bias)
            return F.batch_norm(input, mean, variance, *affine, mean is None, eps=self.eps)
        dtype, input = input.dtype, input.to(self.weight.dtype if self.affine else torch.float32)
        dims, shape = [0, *range(2, input.dim())], [1, -1] + [1] * (input.dim() - 2)
        size_here = input.new_full((1,), input.numel() / input.shape[1])  # values per channel
        counts = float(not self.is_padding)  # weight of this rank's samples
        sums: Tensor = _Sum.apply(counts * torch.cat([input.sum(dims), size_here]))  # type: ignore[no-untyped-call]
        centre, size = sums[:-1] / sums[-1], sums[-1].detach()
        centred = input - centre.view(shape)
        spread: Tensor = _Sum.apply(counts * centred.square().sum(dims)) / size  # type: ignore[no-untyped-call]
        if mean is not None and variance is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            mean.lerp_(centre.detach(), weight)
            variance.lerp_(spread.detach() * size / (size - 1).clamp(min=1), weight)
        normal = centred * (spread.view(shape) + self.eps).rsqrt()
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(dtype)


class _Sum(torch.autograd.Function):
    """An all-reduce that sums, with a gradient for every rank; torch's own is deprecated."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    backward = forward  # the gradient is the sum of all ranks' gradients


class SyncBatchNormAnywhere(LayerSync):
    """Lightning's plugin for ``trainer.sync_batchnorm``, which also works on CPUs."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Turn every BatchNorm into a ``SyncBatchNorm``."""
        self.classes = {m: type(m) for m in model.modules() if isinstance(m, BATCH_NORMS)}
        for module in self.classes:
            module.__class__ = SyncBatchNorm
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Restore the layers' classes."""
        for module, original in self.classes.items():
            module.__class__ = original
        return model


def batch_norm_warning(trainer: pl.Trainer, module: nn.Module) -> str:
    """Return a warning if BatchNorm trains on a local batch, otherwise ""."""
    if not trainer.is_global_zero:
        return ""
    synced = (SyncBatchNorm, nn.SyncBatchNorm) if trainer.world_size > 1 else ()
    norms = [p for p in module.modules() if isinstance(p, BATCH_NORMS) and p.training]
    has_unsynced = any(not isinstance(p, synced) for p in norms)
    if norms and int(trainer.accumulate_grad_batches) > 1:
        return ACCUMULATED
    is_parallel = isinstance(trainer.strategy, ParallelStrategy)
    has_local_batches = is_parallel and trainer.world_size * trainer.num_devices > 1
    return LOCAL_BATCH if has_local_batches and has_unsynced else ""
