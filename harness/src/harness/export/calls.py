"""What a network is called with in a brief test of its run's own data."""

import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor, nn

from harness.convert.names import NETWORKS
from harness.errors import UserError
from harness.run import inputs
from harness.run.mistakes import user_errors

NUM_BATCHES = 2  # of each loader


class Call(NamedTuple):
    """One call of the network in a test."""

    inputs: dict[str, Tensor]  # by the names in the signature
    constants: dict[str, Any]  # the other arguments

    @property
    def batch_size(self) -> int:
        """Rows of the first input that has some; inputs with as many are batches."""
        return next((len(tensor) for tensor in self.inputs.values() if tensor.ndim), 0)

    def resized(self, num: int) -> list[Tensor]:
        """The inputs with another number of samples, from the first on and again from there."""
        size = self.batch_size
        rows = torch.arange(num) % max(size, 1)
        return [t[rows] if t.ndim and len(t) == size else t for t in self.inputs.values()]

    def shapes(self) -> dict[str, tuple[Any, ...]]:
        """Shapes without the batch's size."""
        size = self.batch_size
        return {
            name: ("batch", *t.shape[1:]) if t.ndim and len(t) == size else tuple(t.shape)
            for name, t in self.inputs.items()
        }


def observed(model: pl.LightningModule, data: Any) -> tuple[nn.Module, list[Call]]:
    """Whose forward a brief test calls, and with what: the module's own, or else its network's.

    Raises:
        UserError: if it calls neither, or with what no file could take.
    """
    networks = [getattr(model, name, None) for name in NETWORKS]
    seen: dict[nn.Module, list[Call]] = {
        module: [] for module in (model, *networks) if isinstance(module, nn.Module)
    }

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        tensors = {k: v.detach().clone() for k, v in bound.items() if isinstance(v, Tensor)}
        seen[module].append(Call(tensors, {k: v for k, v in bound.items() if k not in tensors}))

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in seen]
    missing = inputs.missing_for_test(model, data)
    with user_errors(), quiet():
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            plugins=[LightningEnvironment()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            limit_test_batches=NUM_BATCHES,
            limit_val_batches=NUM_BATCHES,
            inference_mode=False,  # whose tensors could not be traced
        )
        (trainer.validate if missing else trainer.test)(model, data, verbose=False)
    for hook in hooks:
        hook.remove()
    name = type(model).__name__
    module, calls = next(((m, c) for m, c in seen.items() if c), (model, []))
    if not calls:
        step = "validation_step" if missing else "test_step"
        raise UserError(
            f"{name}.{step} calls neither self(...), self.net(...) nor self.model(...): nothing to "
            "export. Let it call self(...), and forward compute what other programs want."
        )
    first = calls[0]
    nested = [name for name, value in first.constants.items() if any(True for _ in inside(value))]
    if nested or not first.batch_size:
        what = f"tensors inside of {nested[0]}" if nested else "no batch of tensors"
        raise UserError(
            f"{type(module).__name__}.forward gets {what}, and a file has tensors for inputs: "
            "let each be an argument of its own."
        )
    for name, value in first.constants.items():
        if any(repr(call.constants.get(name)) != repr(value) for call in calls):
            raise UserError(
                f"{type(module).__name__}.forward gets another {name} with another batch, and a "
                "file would hold the first one: let it be a tensor."
            )
    if any(call.shapes() != first.shapes() for call in calls):
        shapes = " and ".join(sorted({str(call.shapes()) for call in calls})[:2])
        raise UserError(
            f"{type(module).__name__} gets batches of different shapes, {shapes}, and a file has "
            "one for all but the batch size: pad them to one."
        )
    return module, calls


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch and its converter say to their own authors."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def inside(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from inside(part)
