"""dp: one process on one machine drives all its devices; the part that ddp2 shares with it.

A step runs once, on the whole batch. The loader's sampler says how many samples that has, and
calls of the network are split by these rows (`parallel_forward`), over all devices of the process.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ParallelStrategy, SingleDeviceStrategy
from torch import nn

from harness.data.loaders import leaves
from harness.errors import UserError
from harness.names import as_names

from .parallel_forward import ParallelForward


class NodeParallelStrategy(ParallelStrategy):
    """Split calls of modules over all devices of the process, from setup to teardown.

    Args:
        modules: submodules whose calls are split, such as ["net"]; by default the LightningModule.
        whole_inputs: arguments of forward that go whole to every device, such as ["mask"].
        scalar_outputs: "mean" allows a forward that returns a loss, if it is a mean over samples.
        **kwargs: arguments of Lightning's strategy.
    """

    def __init__(
        self,
        *,
        modules: Sequence[str] = (),
        whole_inputs: Sequence[str] = (),
        scalar_outputs: Literal["error", "mean"] = "error",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.modules, self.whole_inputs = as_names(modules or ()), as_names(whole_inputs)
        self.scalar_outputs = scalar_outputs
        self.parallel_forwards: list[ParallelForward] = []

    @property
    def root_device(self) -> torch.device:
        """Return the process's first device, which holds the parameters and computes the loss."""
        assert self.parallel_devices
        return self.parallel_devices[0]

    def setup(self, trainer: pl.Trainer) -> None:
        """Split forward once the model is on the root device."""
        assert self.lightning_module is not None
        named_parts(self.lightning_module, self.modules)  # refuses before Lightning wraps it
        super().setup(trainer)
        devices = self.parallel_devices or []
        parts = named_parts(self.lightning_module, self.modules or ("",))
        options = self.whole_inputs, self.scalar_outputs
        self.parallel_forwards = [
            ParallelForward(part, devices, *options) for part in parts if len(devices) > 1
        ]

    def teardown(self) -> None:
        """Restore the forward of the modules, also after an exception."""
        for forward in self.parallel_forwards:
            forward.remove()
        self.parallel_forwards = []
        super().teardown()

    @contextmanager
    def splitting_calls(self, num_samples: int) -> Iterator[None]:
        """Split calls of a batch of so many samples, outside of the run's own steps."""
        before = [(forward, forward.is_called) for forward in self.parallel_forwards]
        for forward, _ in before:
            forward.batch_sizes = (num_samples,)
        try:
            yield
        finally:
            for forward, is_called in before:
                forward.batch_sizes, forward.is_called = None, is_called

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step once, on the whole batch; refuse one that leaves the other devices idle."""
        with self._splitting(args):
            output = super().training_step(*args, **kwargs)
        if self.parallel_forwards and not any(one.is_called for one in self.parallel_forwards):
            names = " or ".join(f"self.{name}(...)" for name in self.modules) or "self(...)"
            raise UserError(
                f"training_step never called {names}, so {self.root_device} would compute alone: "
                "name what it calls (trainer.strategy.modules=[net]), or call it through self(...)."
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


class DataParallelStrategy(NodeParallelStrategy):
    """Split each batch over the devices of one process.

    Gradients flow back through the copies of the parameters to the first device. Nothing is
    reduced between processes, because there is one. Arguments: see `NodeParallelStrategy`.
    """

    model_to_device = SingleDeviceStrategy.model_to_device
    reduce = SingleDeviceStrategy.reduce
    all_gather = SingleDeviceStrategy.all_gather
    barrier = SingleDeviceStrategy.barrier
    broadcast = SingleDeviceStrategy.broadcast

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the settings of a sampler for one process, which loads whole batches."""
        return {"num_replicas": 1, "rank": 0}


def named_parts(module: pl.LightningModule, names: Sequence[str]) -> list[nn.Module]:
    """Return the submodules that ``trainer.strategy.modules`` names; "" is the module itself."""
    parts = dict(module.named_modules())
    if missing := [name for name in names if name not in parts]:
        children = ", ".join(child for child, _ in module.named_children())
        raise UserError(
            f"trainer.strategy.modules names {missing[0]}, and {type(module).__name__} has "
            f"{children}."
        )
    return [parts[name] for name in names]


def batch_sizes(trainer: pl.Trainer, step_args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the samples that each loader gives to a step; nothing if a sampler cannot say.

    The step is given the batch, and as its signature asks for them its number and its loader's.
    """
    if len(step_args) == 1 and not trainer.training:
        return ()  # Lightning gives the number of an evaluation's batch to steps alone
    batch_idx = step_args[1] if len(step_args) > 1 else trainer.fit_loop.batch_idx
    prefix = trainer.state.stage.dataloader_prefix  # type: ignore[union-attr]
    loaders: Any = getattr(trainer, f"{prefix}_dataloader{'' if trainer.training else 's'}")
    every = [loaders] if hasattr(loaders, "batch_sampler") else leaves(loaders)
    if len(step_args) > 2:
        every = [every[step_args[2]]]
    sizes = [_num_samples(getattr(loader, "batch_sampler", None), batch_idx) for loader in every]
    return () if None in sizes else tuple(size for size in sizes if size)


def _num_samples(sampler: Any, batch_idx: int) -> int | None:
    """Return a batch's samples: None if the sampler does not count them, 0 if it has ended."""
    # For a prediction Lightning wraps the sampler, and records the drawn indices.
    if (drawn := getattr(sampler, "seen_batch_indices", None)) is not None:
        return len(drawn[batch_idx]) if batch_idx < len(drawn) else None
    if not hasattr(sampler, "num_samples_in"):
        return None
    return sampler.num_samples_in(batch_idx) if sampler.counts(batch_idx)[1] else 0
