"""The part that dp and ddp2 share: calls of the network are split by the rows of the batch.

A step runs once, on the whole batch. The loader's sampler says how many samples that has, and
calls of the network are split by these rows (`parallel_forward`), over all devices of the process.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ParallelStrategy
from torch import nn

from harness.data.loaders import leaves
from harness.errors import UserError
from harness.names import as_names

from .parallel_forward import ParallelForward


class NodeParallelStrategy(ParallelStrategy):
    """Splits calls of modules over all devices of the process, from setup to teardown.

    Args:
        modules: submodules whose calls are split, such as ["net"]; by default the LightningModule.
        whole_inputs: arguments of forward that go whole to every device, such as ["mask"].
        scalar_outputs: "mean" allows a forward that returns a loss, if it is a mean over samples.
        **kwargs: arguments of Lightning's strategy.
    """

    def __init__(
        self,
        *,
        modules: Sequence[str] | None = None,
        whole_inputs: Sequence[str] = (),
        scalar_outputs: Literal["error", "mean"] = "error",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.modules = None if modules is None else as_names(modules)
        self.whole_inputs, self.scalar_outputs = as_names(whole_inputs), scalar_outputs
        self.parallel_forwards: list[ParallelForward] = []

    @property
    def root_device(self) -> torch.device:
        """The first device of the process: it holds the parameters and computes the loss."""
        assert self.parallel_devices
        return self.parallel_devices[0]

    def setup(self, trainer: pl.Trainer) -> None:
        """Split forward once the model is on the root device."""
        assert self.lightning_module is not None
        named_parts(self.lightning_module, self.modules or ())  # refuses before Lightning wraps it
        super().setup(trainer)
        self.parallel_forwards = self._split(self.lightning_module)

    def teardown(self) -> None:
        """Restore the forward of the modules, also after an exception."""
        for forward in self.parallel_forwards:
            forward.remove()
        self.parallel_forwards = []
        super().teardown()

    def split_calls(self, copied: pl.LightningModule, num_samples: int) -> None:
        """Split the calls of a copy of the module, whose batches have `num_samples` samples."""
        for forward in self._split(copied):
            forward.batch_sizes = (num_samples,)

    def _split(self, module: pl.LightningModule) -> list[ParallelForward]:
        devices = self.parallel_devices or []
        parts = named_parts(module, self.modules or ("",)) if len(devices) > 1 else []
        whole, scalars = self.whole_inputs, self.scalar_outputs
        return [ParallelForward(part, devices, whole, scalars) for part in parts]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step once, on the whole batch; refuse one that leaves the other devices idle."""
        with self._splitting(args):
            output = super().training_step(*args, **kwargs)
        if self.parallel_forwards and not any(one.num_calls for one in self.parallel_forwards):
            names = " or ".join(f"self.{name}(...)" for name in self.modules or ())
            raise UserError(
                f"training_step never called {names or 'self(...)'}, so {self.root_device} would "
                "compute alone.\nName the modules that it calls, as in "
                "trainer.strategy.modules=[net], or call them through self(...)."
            )
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step once, on the whole batch."""
        with self._splitting(args):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step once, on the whole batch."""
        with self._splitting(args):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step once, on the whole batch."""
        with self._splitting(args):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _splitting(self, step_args: tuple[Any, ...]) -> Iterator[None]:
        """Let calls be split by the number of samples that the step's batch has."""
        assert self.lightning_module is not None
        sizes = batch_sizes(self.lightning_module.trainer, step_args)
        for forward in self.parallel_forwards:
            forward.batch_sizes = sizes
        try:
            yield
        finally:
            for forward in self.parallel_forwards:
                forward.batch_sizes = None


def named_parts(module: pl.LightningModule, names: Sequence[str]) -> list[nn.Module]:
    """The submodules that ``trainer.strategy.modules`` names; "" is the module itself."""
    parts = dict(module.named_modules())
    if unknown := [name for name in names if name not in parts]:
        raise UserError(
            f"trainer.strategy.modules names {unknown[0]}, which {type(module).__name__} does not "
            f"have.\nIt has: {', '.join(child for child, _ in module.named_children())}."
        )
    return [parts[name] for name in names]


def batch_sizes(trainer: pl.Trainer, step_args: tuple[Any, ...]) -> tuple[int, ...]:
    """The samples that each loader gives to a step, by its sampler; empty if one cannot say.

    Args:
        trainer: runs the step.
        step_args: the batch, and as the step's signature asks for them its number and its loader's.
    """
    if len(step_args) == 1 and not trainer.training:
        return ()  # Lightning tells the number of an evaluation's batch to steps alone
    batch_idx = step_args[1] if len(step_args) > 1 else trainer.fit_loop.batch_idx
    prefix = trainer.state.stage.dataloader_prefix  # type: ignore[union-attr]
    loaders: Any = getattr(trainer, f"{prefix}_dataloader{'' if trainer.training else 's'}")
    every = [loaders] if hasattr(loaders, "batch_sampler") else leaves(loaders)
    if len(step_args) > 2:
        every = [every[step_args[2]]]
    sizes = [_num_samples(getattr(loader, "batch_sampler", None), batch_idx) for loader in every]
    return () if None in sizes else tuple(size for size in sizes if size)


def _num_samples(sampler: Any, batch_idx: int) -> int | None:
    """The samples of a batch: None if the sampler does not count them, 0 if it has ended."""
    # For a prediction Lightning wraps the sampler, and records the drawn indices.
    if (drawn := getattr(sampler, "seen_batch_indices", None)) is not None:
        return len(drawn[batch_idx]) if batch_idx < len(drawn) else None
    if not hasattr(sampler, "num_samples_in"):
        return None
    return 0 if sampler.has_ended(batch_idx) else sampler.num_samples_in(batch_idx)
