"""One call of a module, split over several devices."""

import contextvars
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from harness.errors import UserError

from .comparison import Comparison
from .device_threads import DeviceThreads
from .replica import Replica, Substitute
from .replicable import check_devices
from .splitting import join, split

log = logging.getLogger(__name__)

# True while shares run: a module inside a split module is not split again.
_splitting = contextvars.ContextVar("splitting", default=False)


class ParallelForward(Substitute):
    """Replaces a module's `forward` between `install` and `remove`.

    The first device uses the module itself, the others use replicas. What forward writes into
    the module, such as running statistics, therefore comes from the first share.

    Args:
        module: lives on `devices[0]`.
        devices: one per share; a device may be named several times.
        whole_inputs, scalar_outputs, check: see `NodeParallelStrategy`.
        threads: a thread per device; by default on anything but a CPU.

    Attributes:
        batch_sizes: samples in the running batch; empty where nobody knows.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        whole_inputs: Sequence[str] = (),
        scalar_outputs: Literal["error", "mean"] = "error",
        threads: bool | None = None,
        check: bool = True,
    ) -> None:
        check_devices(module, devices)
        self.module, self.devices = module, list(devices)
        self.original: Callable[..., Any] = module.forward
        self.own_forward = module.__dict__.get("forward")  # set by torch.compile, for example
        self.whole = _positions_and_names(self.original, whole_inputs)
        self.scalar_outputs = scalar_outputs
        self.threads = DeviceThreads(devices, threads)
        indices = dict.fromkeys(d.index for d in devices if d.type == "cuda")
        self.generators = [torch.cuda.default_generators[index] for index in indices]
        # One set per grad mode: reentrant checkpointing runs a forward again during backward,
        # and must find copies with a graph even if a call without gradients came in between.
        self.replicas: dict[bool, list[Replica]] = {True: [], False: []}
        self.num_calls = 0
        self.is_idle_told = False
        self.last_sizes: list[int] = []
        self.batch_sizes: Sequence[int] = ()
        self.comparison = (
            Comparison(module, devices[0], len(devices), self.whole, scalar_outputs)
            if check
            else None
        )

    def install(self) -> None:
        """Split every call from now on; neither state_dict nor attribute paths change."""
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        """Restore the module's forward and free the replicas."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self.own_forward is not None:
                self.module.__dict__["forward"] = self.own_forward
        self.replicas = {True: [], False: []}
        self.threads.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of the module have the original forward."""
        return getattr, (self.module, "forward")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split the inputs, run the shares at the same time, join the outputs on device 0."""
        if _splitting.get():
            return self.original(*args, **kwargs)
        self.num_calls += 1
        shares = split(args, kwargs, self.devices, self.whole, self.batch_sizes)
        self.last_sizes = [share.num_samples for share in shares]
        if len(shares) == 1:
            if self.last_sizes == [1] and max(self.batch_sizes, default=1) > 1:
                self._tell_of_idle_devices()
            return self.original(*args, **kwargs)
        reseed_like_seeded(self.generators)
        token = _splitting.set(True)
        try:
            if self.comparison and not self.comparison.allows(
                args, kwargs, self.batch_sizes, sum(self.last_sizes)
            ):
                self.last_sizes = [sum(self.last_sizes)]
                return self.original(*args, **kwargs)
            # Every device has been asked for its copies before the first forward starts.
            forwards = [self.original, *self._replica_forwards(len(shares) - 1)]
            jobs = [
                functools.partial(forward, *share.args, **share.kwargs)
                for forward, share in zip(forwards, shares, strict=True)
            ]
            outputs = self.threads.run(jobs)
        finally:
            _splitting.reset(token)
            if not torch.is_grad_enabled():
                for replica in self.replicas[False]:
                    replica.release()
        return join(outputs, self.last_sizes, self.scalar_outputs)

    def _tell_of_idle_devices(self) -> None:
        if not self.is_idle_told:
            self.is_idle_told = True
            log.warning(
                "forward() of %s gets nothing that has a row per sample: %s computes it alone. "
                "strategy=ddp uses all devices.",
                type(self.module).__name__,
                self.devices[0],
            )

    def _replica_forwards(self, count: int) -> list[Callable[..., Any]]:
        grad = torch.is_grad_enabled()
        replicas = self.replicas[grad]
        if not replicas or not replicas[0].fits():
            replicas = [Replica(self.module, device) for device in self.devices[1:]]
            self.replicas[grad] = replicas
        return [replica.refresh(self.devices[0]).forward for replica in replicas[:count]]


def reseed_like_seeded(generators: Sequence[torch.Generator]) -> None:
    """Reseed the generators of devices that were seeded like the first one.

    `torch.manual_seed` gives every GPU the same seed, so that all replicas would drop the same
    units. The first generator is never touched, and a second call changes nothing; after the
    next `manual_seed` the generators are reseeded in the same way.
    """
    for offset, generator in enumerate(generators[1:], start=1):
        if generator.initial_seed() == generators[0].initial_seed():
            generator.manual_seed((generator.initial_seed() + offset) % 2**63)


def _positions_and_names(forward: Callable[..., Any], names: Sequence[str]) -> frozenset[int | str]:
    parameters = inspect.signature(forward).parameters if names else {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in names:
        if name not in parameters and not takes_any:
            raise UserError(
                f"trainer.strategy.whole_inputs names {name}, which forward() does not take.\n"
                f"It takes: {', '.join(parameters)}."
            )
    return frozenset([*names, *(i for i, name in enumerate(parameters) if name in names)])
