"""dp: one process on one machine drives all its devices. dp and ddp2 share a base class here.

A step runs once, on the whole batch. The loader's sampler counts the samples of that batch. Each
call of the network is split by samples over all devices of the process (`parallel_forward`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ParallelStrategy, SingleDeviceStrategy
from torch import nn

from harness.data.loaders import flat_loaders
from harness.errors import UserError
from harness.keys import as_names

from .parallel_forward import ParallelForward


class NodeParallelStrategy(ParallelStrategy):
    """Split calls of modules over all devices of the process, from setup to teardown.

    Args:
        modules: submodules whose calls are split, such as ["net"]; by default the LightningModule.
        whole_inputs: arguments of forward that each device gets in full, such as ["mask"].
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
        named_submodules(self.lightning_module, self.modules)  # raises before Lightning wraps it
        super().setup(trainer)
        devices = self.parallel_devices or []
        modules = named_submodules(self.lightning_module, self.modules or ("",))
        options = self.whole_inputs, self.scalar_outputs
        self.parallel_forwards = [
            ParallelForward(module, devices, *options) for module in modules if len(devices) > 1
        ]

    def teardown(self) -> None:
        """Restore the modules' forward. Lightning also calls this after an exception."""
        for forward in self.parallel_forwards:
            forward.remove()
        self.parallel_forwards = []
        super().teardown()

    @contextmanager
    def splitting_calls(self, num_samples: int) -> Iterator[None]:
        """Split calls for a batch of ``num_samples`` outside of the run's own steps."""
        were_called = [(forward, forward.is_called) for forward in self.parallel_forwards]
        for forward, _ in were_called:
            forward.batch_sizes = (num_samples,)
        try:
            yield
        finally:
            for forward, was_called in were_called:
                forward.batch_sizes, forward.is_called = None, was_called

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step once, on the whole batch; raise an error if it used only one device."""
        with self._splitting(args):
            output = super().training_step(*args, **kwargs)
        if self.parallel_forwards and not any(f.is_called for f in self.parallel_forwards):
            names = " or ".join(f"self.{name}(...)" for name in self.modules) or "self(...)"
            raise UserError(
                f"training_step never called {names}, so only {self.root_device} would compute.\n"
                "Name the submodule that training_step calls, as in "
                "trainer.strategy.modules=[net], or let training_step call self(...)."
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
        """Split the calls in a step by the number of samples in its batch."""
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

    Gradients flow back through the copies of the parameters to the first device. There is only one
    process, so no collective runs. Arguments: see `NodeParallelStrategy`.
    """

    model_to_device = SingleDeviceStrategy.model_to_device
    reduce = SingleDeviceStrategy.reduce
    all_gather = SingleDeviceStrategy.all_gather
    barrier = SingleDeviceStrategy.barrier
    broadcast = SingleDeviceStrategy.broadcast

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return a sampler's settings for a single process, which loads the global batch."""
        return {"num_replicas": 1, "rank": 0}


def named_submodules(module: pl.LightningModule, names: Sequence[str]) -> list[nn.Module]:
    """Return the submodules that ``trainer.strategy.modules`` lists; "" is the module itself.

    Raises:
        UserError: a submodule does not exist.
    """
    submodules = dict(module.named_modules())
    if missing := [name for name in names if name not in submodules]:
        children = ", ".join(child for child, _ in module.named_children())
        raise UserError(
            f"trainer.strategy.modules={[*names]}: {type(module).__name__} has no {missing[0]}. "
            f"Use some of {children}, or their submodules."
        )
    return [submodules[name] for name in names]


def batch_sizes(trainer: pl.Trainer, step_args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the number of samples that each loader has in a step's batch.

    The result is empty if a sampler cannot count them. ``step_args`` are the step's arguments: the
    batch, then ``batch_idx`` and ``dataloader_idx`` if the step has these parameters.
    """
    if len(step_args) == 1 and not trainer.training:
        return ()  # an evaluation step without batch_idx: Lightning stores it nowhere else
    batch_idx = step_args[1] if len(step_args) > 1 else trainer.fit_loop.batch_idx
    prefix = trainer.state.stage.dataloader_prefix  # type: ignore[union-attr]
    configured: Any = getattr(trainer, f"{prefix}_dataloader{'' if trainer.training else 's'}")
    loaders = [configured] if hasattr(configured, "batch_sampler") else flat_loaders(configured)
    if len(step_args) > 2:
        loaders = [loaders[step_args[2]]]
    sizes = [_num_samples(getattr(loader, "batch_sampler", None), batch_idx) for loader in loaders]
    return () if None in sizes else tuple(size for size in sizes if size)


def _num_samples(sampler: Any, batch_idx: int) -> int | None:
    """Return a batch's number of samples: None if unknown, 0 after the sampler's last batch."""
    # In a prediction Lightning wraps the sampler, and records the indices of each batch.
    if (drawn := getattr(sampler, "seen_batch_indices", None)) is not None:
        return len(drawn[batch_idx]) if batch_idx < len(drawn) else None
    if not hasattr(sampler, "num_samples_in"):
        return None
    return sampler.num_samples_in(batch_idx) if sampler.counts(batch_idx)[1] else 0
