"""Context managers that keep the parity check from changing the training around it."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from harness.data.randomness import preserved_generators


@contextlib.contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """Restore generators, and switch off printing, warnings and torch.compile."""
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        preserved_generators(),
        torch.compiler.set_stance("force_eager"),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the training step will warn again
        yield


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Switch off TF32 and cuDNN's benchmark mode, which chooses algorithms by measured time."""
    cudnn, precision = torch.backends.cudnn, torch.get_float32_matmul_precision()
    flags = {"enabled": cudnn.enabled, "deterministic": cudnn.deterministic}
    try:
        with cudnn.flags(**flags, benchmark=False, allow_tf32=False):
            torch.set_float32_matmul_precision("highest")
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Remove the gradients, and restore them and ``requires_grad`` at the end."""
    saved = [(p, p.grad, p.requires_grad) for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient, flag in saved:
            parameter.requires_grad_(flag).grad = gradient


def do_nothing(*_: Any, **__: Any) -> None:
    """Accept any arguments and do nothing. A check replaces methods by this function."""
