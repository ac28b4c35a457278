"""Kinds of values and classes that several folders of the library distinguish."""

from typing import Any

import torch
from torch import Tensor, nn

SCALARS = {type(None), bool, int, float, complex, str, bytes, bytearray}
SCALARS |= {torch.Size, torch.dtype, torch.device, torch.layout}
# Packages whose classes are not the user's, and packages that only display or log a run.
FRAMEWORKS = ("pytorch_lightning", "lightning_fabric", "torchmetrics", "harness")
REPORTING = ("tqdm", "rich", "tensorboard", "wandb", "mlflow", "comet_ml", "matplotlib")

# Layers that normalise over the batch, and all norm layers that may have running statistics.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
RUNNING_STATS_NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

# Types of devices without tensors in double precision: Apple's GPU.
WITHOUT_FLOAT64 = {"mps"}
MOST_SUMMED = 2**22  # elements of a larger tensor that are summed


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: float64, or float32 if the device has no float64."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def package(kind: Any) -> str:
    """Return the name of the package that defines a class."""
    return str(kind.__module__).partition(".")[0]


def corner(tensor: Tensor) -> Tensor:
    """Return a corner of a large tensor, as a view, because a sum in float64 copies its input."""
    length = int(MOST_SUMMED ** (1 / max(1, tensor.ndim)))
    return tensor if tensor.numel() <= MOST_SUMMED else tensor[(slice(length),) * tensor.ndim]
