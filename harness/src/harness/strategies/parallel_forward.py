"""One call of a module, split over several devices."""

import contextlib
import contextvars
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import nn

from .replica import Replica
from .splitting import join, split

log = logging.getLogger(__name__)

IDLE = (
    "forward() of %s gets nothing that has a row per sample, or nobody says how many samples a "
    "batch has, as with a stream of ready batches: %s computes it alone. Use strategy=ddp."
)
# True while shares run: a module inside a split module is not split again.
_splitting = contextvars.ContextVar("splitting", default=False)


class ParallelForward:
    """Replaces the `forward` of a module until `remove`.

    The first device uses the module itself, and what forward writes into it, such as running
    statistics, comes from the first share; the others use replicas. One thread asks all devices: a
    GPU computes while the next one is asked, and Python runs one thread at a time.

    Args:
        module: lives on `devices[0]`.
        devices: one per share; a device may be named several times.
        whole_inputs, scalar_outputs: see `NodeParallelStrategy`.

    Attributes:
        batch_sizes: samples of the running batch, by loader; empty where nobody counts them, and
            None outside of steps: such calls are not split.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        whole_inputs: Sequence[str] = (),
        scalar_outputs: Literal["error", "mean"] = "error",
    ) -> None:
        self.module, self.devices = module, list(devices)
        self.whole_inputs, self.scalar_outputs = whole_inputs, scalar_outputs
        self.original: Callable[..., Any] = module.forward
        self.own_forward = vars(module).get("forward")  # set by torch.compile, for example
        parameters = inspect.signature(self.original).parameters.values()
        self.names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        indices = dict.fromkeys(d.index for d in devices if d.type == "cuda")
        self.generators = [torch.cuda.default_generators[index] for index in indices]
        # One set per grad mode: reentrant checkpointing runs a forward again during backward,
        # and must find copies with a graph even if a call without gradients came in between.
        self.replicas: dict[bool, list[Replica]] = {True: [], False: []}
        self.num_calls, self.has_warned = 0, False
        self.last_sizes: list[int] = []
        self.batch_sizes: Collection[int] | None = None
        vars(module)["forward"] = self  # neither state_dict nor attribute paths change

    def remove(self) -> None:
        """Restore the module's forward and free the replicas."""
        if vars(self.module).get("forward") is self:
            del vars(self.module)["forward"]
            vars(self.module).update({"forward": self.own_forward} if self.own_forward else {})
        self.replicas = {True: [], False: []}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of the module have the original forward."""
        return getattr, (self.module, "forward")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split the inputs, compute the shares, join the outputs on the first device."""
        if _splitting.get():
            return self.original(*args, **kwargs)
        self.num_calls += 1
        names = [*self.names, *(f"#{i + 1}" for i in range(len(self.names), len(args)))][
            : len(args)
        ]
        is_counted, shares = max(self.batch_sizes or (), default=1) > 1, []
        if self.batch_sizes and is_counted:
            given = {**dict(zip(names, args, strict=True)), **kwargs}
            shares = split(given, self.devices, self.batch_sizes, self.whole_inputs)
        self.last_sizes = [size for _, size in shares]
        if len(shares) < 2:
            if not self.has_warned and (is_counted or self.batch_sizes == ()):
                self.has_warned = True
                log.warning(IDLE, type(self.module).__name__, self.devices[0])
            return self.original(*args, **kwargs)
        reseed_like_seeded(self.generators)
        token, outputs = _splitting.set(True), []
        try:
            # Every device has been asked for its copies before the first forward starts.
            forwards = [self.original, *self._replica_forwards(len(shares) - 1)]
            for forward, (own, _), device in zip(forwards, shares, self.devices, strict=False):
                is_gpu = device.type == "cuda"
                with torch.cuda.device(device) if is_gpu else contextlib.nullcontext():
                    outputs.append(forward(*[own.pop(name) for name in names], **own))
        finally:
            _splitting.reset(token)
            if not torch.is_grad_enabled():
                for replica in self.replicas[False]:
                    replica.release()
        return join(outputs, self.last_sizes, self.scalar_outputs)

    def _replica_forwards(self, count: int) -> list[Callable[..., Any]]:
        replicas = self.replicas[torch.is_grad_enabled()]
        if not replicas or not replicas[0].fits():
            replicas[:] = [Replica(self.module, device) for device in self.devices[1:]]
        return [replica.refresh(self.devices[0]).forward for replica in replicas[:count]]


def reseed_like_seeded(generators: Sequence[torch.Generator]) -> None:
    """Reseed what `torch.manual_seed` has seeded alike: all GPUs would drop the same units."""
    for offset, generator in enumerate(generators[1:], start=1):
        if generator.initial_seed() == generators[0].initial_seed():
            generator.manual_seed((generator.initial_seed() + offset) % 2**63)
