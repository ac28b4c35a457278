"""What dp and ddp2 share: when forward is split, and which misuses are refused."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ParallelStrategy

from harness.errors import UserError
from harness.names import as_names
from harness.upstream.replication import synchronises_batch_norm

from .batch_sizes import batch_sizes
from .parallel_forward import ParallelForward
from .replicable import check_module


class NodeParallelStrategy(ParallelStrategy):
    """Splits calls of modules over all devices of the process, from setup to teardown.

    Args:
        modules: submodules of the LightningModule whose calls are split, such as ["net"]; by
            default calls of the LightningModule itself, `self(x)`.
        whole_inputs: arguments of forward that go whole to every device, such as ["mask"].
        scalar_outputs: "mean" allows a forward that returns a loss, if it is a mean over samples.
        check_forward: compare the first calls with calls that are not split, and refuse a forward
            that does not treat each sample by itself.
        **kwargs: arguments of the Lightning strategy that a subclass inherits from.
    """

    strategy_name: str

    def __init__(
        self,
        *,
        modules: Sequence[str] | None = None,
        whole_inputs: Sequence[str] = (),
        scalar_outputs: Literal["error", "mean"] = "error",
        check_forward: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if scalar_outputs not in ("error", "mean"):
            raise UserError(
                f"trainer.strategy.scalar_outputs={scalar_outputs} is unknown: error or mean."
            )
        self.modules = None if modules is None else as_names(modules)
        self.whole_inputs = as_names(whole_inputs)
        self.scalar_outputs: Literal["error", "mean"] = scalar_outputs
        self.check_forward = check_forward
        self.parallel_forwards: list[ParallelForward] = []
        self._is_first_step = True

    @property
    def root_device(self) -> torch.device:
        """The first device of the process: it holds the parameters and computes the loss."""
        assert self.parallel_devices
        return self.parallel_devices[0]

    def set_world_ranks(self) -> None:
        """Check the launch; Lightning calls this at the end of Trainer(...), with all settings."""
        if synchronises_batch_norm(self):  # set by the Trainer, like num_nodes
            raise UserError(
                f"strategy={self.strategy_name} cannot share BatchNorm statistics between the "
                "devices of a process, but trainer.sync_batchnorm=true.\n"
                "Use strategy=ddp, or trainer.sync_batchnorm=false."
            )

    def setup(self, trainer: pl.Trainer) -> None:
        """Split forward once the model is on the root device."""
        assert self.lightning_module is not None
        assert self.parallel_devices
        modules = [self._submodule(name) for name in self.modules or ("",)]
        if len(self.parallel_devices) == 1:
            modules = []
        for module in modules:
            check_module(module)
        super().setup(trainer)
        for module in modules:
            forward = ParallelForward(
                module,
                self.parallel_devices,
                self.whole_inputs,
                self.scalar_outputs,
                check=self.check_forward,
            )
            forward.install()
            self.parallel_forwards.append(forward)

    def teardown(self) -> None:
        """Restore the forward of the modules, also after an exception."""
        for forward in self.parallel_forwards:
            forward.remove()
        self.parallel_forwards.clear()
        self._is_first_step = True
        super().teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step once, on the whole batch; refuse one that leaves the other devices idle."""
        num_calls = self._num_calls()
        output = self._on_batch(super().training_step, args, kwargs)
        if self._is_first_step and self.parallel_forwards and self._num_calls() == num_calls:
            what = " or ".join(f"self.{name}(...)" for name in self.modules or ()) or "self(...)"
            raise UserError(
                f"training_step never called {what}, so strategy={self.strategy_name} would use "
                f"{self.root_device} alone.\nName the modules that it calls, as in "
                "trainer.strategy.modules=[net], or call them through self(...)."
            )
        self._is_first_step = False
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step once, on the whole batch."""
        return self._on_batch(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step once, on the whole batch."""
        return self._on_batch(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step once, on the whole batch."""
        return self._on_batch(super().predict_step, args, kwargs)

    def _on_batch(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a step whose calls know how many samples the batch has."""
        assert self.lightning_module is not None
        has_split = bool(self.parallel_forwards)
        sizes = batch_sizes(self.lightning_module.trainer, args) if has_split else ()
        for forward in self.parallel_forwards:
            forward.batch_sizes = sizes
        try:
            return step(*args, **kwargs)
        finally:
            for forward in self.parallel_forwards:
                forward.batch_sizes = ()

    def _num_calls(self) -> int:
        return sum(forward.num_calls for forward in self.parallel_forwards)

    def _submodule(self, name: str) -> torch.nn.Module:
        assert self.lightning_module is not None
        try:
            return self.lightning_module.get_submodule(name)
        except AttributeError:
            children = ", ".join(name for name, _ in self.lightning_module.named_children())
            raise UserError(
                f"trainer.strategy.modules names {name}, which "
                f"{type(self.lightning_module).__name__} does not have.\nIt has: {children}."
            ) from None
