"""How far two values are apart, and how far rounding alone may take them."""

from typing import Any

import torch
from torch import Tensor, nn


def tolerance(module: nn.Module, device: torch.device) -> float:
    """The relative difference that rounding may make between calls of two batch sizes.

    It is far above what was measured (1e-7 in float32), as deep networks amplify, and far below
    what a wrong split makes of an output, which is of the order of 1.
    """
    tensors = [*module.parameters(), *module.buffers()]
    kinds = {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    largest = max((torch.finfo(kind).eps for kind in kinds), default=torch.finfo(torch.float32).eps)
    if torch.is_autocast_enabled(device.type) or largest > 1e-3:
        return 5e-2
    if largest < 1e-10:
        return 1e-6
    has_short_products = torch.get_float32_matmul_precision() != "highest"
    return 1e-2 if device.type != "cpu" or has_short_products else 1e-3  # TF32 keeps 10 bits


def difference(expected: Any, found: Any, limit: float) -> float:
    """The difference of two leaves in relation to their size; 0 for what cannot be compared."""
    if isinstance(expected, (bool, int, float)) and isinstance(found, (bool, int, float)):
        expected, found = torch.tensor(float(expected)), torch.tensor(float(found))
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return float("inf") if type(expected) is not type(found) else 0.0
    if expected.shape != found.shape:
        return float("inf")
    if not expected.is_floating_point() and not expected.is_complex():
        # Labels and codes of a rounded score may change; in half precision many do.
        share = (expected != found.to(expected.device)).float().mean().nan_to_num().item()
        return share if limit < 1e-2 else 0.0
    a, b = (_flat(tensor) for tensor in (expected, found))
    size = max(a.norm().item(), b.norm().item())
    return (a - b).norm().item() / size if size > 0 else 0.0


def _flat(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.to("cpu", torch.float64).nan_to_num(0.0, 0.0, 0.0).flatten()
