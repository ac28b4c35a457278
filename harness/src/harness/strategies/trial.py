"""Calls of a module that leave no trace in it: on a twin, with constant random numbers."""

import copy
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from harness.data.randomness import GENERATORS, generator_states, restore_generators
from harness.exact.sync_batch_norm import BATCH_NORMS, NORMS
from harness.upstream.constant_numbers import constant_numbers

from .replica import INTERNAL, Replica


class UndecidableError(Exception):
    """A call that no other one can be compared with."""


@contextmanager
def untraced(device: torch.device, with_grad: bool = False) -> Iterator[None]:
    """Run what is inside without compiled code, and put the generators back.

    Args:
        device: whose generator is put back, besides those of the CPU.
        with_grad: keep the graph, which takes as much memory as training on the whole batch.

    Raises:
        UndecidableError: something was drawn that is not torch's.
    """
    states = generator_states()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        with (
            warnings.catch_warnings(),
            torch.set_grad_enabled(with_grad),
            torch.compiler.set_stance("force_eager"),
            constant_numbers(),
        ):
            warnings.simplefilter("ignore")
            yield
            # Texts, because NumPy's state has an array in it.
            if repr(generator_states()[:2]) != repr(states[:2]):
                raise UndecidableError("it draws random numbers that are not torch's")
    finally:
        restore_generators(states)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)


def fresh_twin(replica: Replica, root: torch.device) -> nn.Module:
    """A twin of the module on its own device, as the module is now.

    BatchNorm uses its running statistics, because those of a batch are not those of its shares.

    Raises:
        UndecidableError: BatchNorm has none.
    """
    twin = replica.refresh(root)
    for part in list(twin.modules()):
        if isinstance(part, Metric):
            continue
        if isinstance(part, BATCH_NORMS):
            if part.running_mean is None:
                raise UndecidableError("BatchNorm has no running statistics")
            part.__dict__["training"] = False
        if isinstance(part, (nn.RNNBase, nn.MultiheadAttention)):
            part.__dict__["dropout"] = 0.0  # which GPUs draw inside of one operation
        if isinstance(part, pl.LightningModule):
            part.__dict__["log"] = lambda *_, **__: None
        for name, child in part.named_children():
            if isinstance(child, Metric):
                setattr(part, name, copy.deepcopy(child))
        for name, value in list(vars(part).items()):
            if isinstance(value, GENERATORS):
                vars(part)[name] = copy.deepcopy(value)
            elif isinstance(value, (set, deque)):
                vars(part)[name] = copy.copy(value)
    return twin


def written(module: nn.Module, twin: nn.Module) -> dict[str, Any]:
    """What a call has changed in a twin: parameters, buffers, and attributes that are numbers.

    Running statistics of norms are left out.
    """
    found: dict[str, Any] = {}
    twins = dict(twin.named_modules())
    for prefix, part in module.named_modules():
        if isinstance(part, Metric) or prefix not in twins:
            continue
        now, dot = twins[prefix], prefix and f"{prefix}."
        before = {**_tensors(part), **vars(part)}
        is_norm = isinstance(part, NORMS)
        after = {**({} if is_norm else _tensors(now)), **vars(now)}
        for name, value in after.items():
            is_number = isinstance(value, (Tensor, int, float)) and name not in INTERNAL
            if is_number and not _is_same(value, before.get(name)):
                found[dot + name] = value
    return found


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }


def _is_same(value: Any, before: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        return value.shape == before.shape and torch.equal(value, before.to(value.device))
    return type(value) is type(before) and bool(value == before)
