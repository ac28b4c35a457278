"""Contexts in which a few samples are computed beside a training that notices nothing."""

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
    """Keep the generators, what is printed, and what torch compiles, out of it."""
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        preserved_generators(),
        torch.compiler.set_stance("force_eager"),
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the run itself will warn
        yield


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Let no product be rounded to TF32, and no convolution be chosen by timing."""
    cudnn, before = torch.backends.cudnn, torch.get_float32_matmul_precision()
    flags = {"enabled": cudnn.enabled, "deterministic": cudnn.deterministic}
    try:
        with cudnn.flags(**flags, benchmark=False, allow_tf32=False):
            torch.set_float32_matmul_precision("highest")
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def gradients_aside(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Put the gradients and ``requires_grad`` of the run aside."""
    before = [(p, p.grad, p.requires_grad) for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient, flag in before:
            parameter.requires_grad_(flag).grad = gradient


def do_nothing(*_: Any, **__: Any) -> None:
    """Replace what would have an effect."""
