"""One call of a module, split over several devices.

In: the arguments of `forward`. They are split by rows (`splitting`). The first device computes its
share with the module itself, each other one with the same module and differentiable copies of its
parameters. Out: the joined outputs, on the first device.
"""

import contextlib
import contextvars
import inspect
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from harness.upstream.networks import computing_on

from .splitting import join, split

log = logging.getLogger(__name__)

IDLE = (
    "forward() of %s gets nothing that has a row per sample, or nobody says how many samples a "
    "batch has, as with a stream of ready batches: %s computes it alone. Use strategy=ddp."
)
# The part that is computed: its number, the rows before it, and its rows; no rows outside of split
# calls. A split module inside of a split module is not split again.
_part = contextvars.ContextVar("part", default=(0, 0, 0))


def running_part() -> tuple[int, int, int]:
    """Return the number of the running part of a split call, the rows before it, and its rows."""
    return _part.get()


class ParallelForward:
    """Replace the `forward` of a module until `remove`.

    Buffers that forward changes, such as running statistics, have the values of the first share.
    One thread asks all devices: a GPU computes while the next one is asked.

    Attributes:
        devices: one per share, which may be the same; the module lives on the first.
        whole_inputs, scalar_outputs: see `NodeParallelStrategy`.
        batch_sizes: samples of the running batch, by loader; empty where no loader counts them,
            and None outside of steps, where calls are not split.
        last_sizes: rows of the shares of the last call; empty if it was not split.
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
        self.instance_forward = vars(module).get("forward")  # set by torch.compile, for example
        parameters = inspect.signature(self.original).parameters.values()
        self.names = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
        self.is_called = self.has_warned = False
        self.last_sizes: list[int] = []
        self.batch_sizes: Collection[int] | None = None
        vars(module)["forward"] = self  # changes neither state_dict nor attribute paths

    def remove(self) -> None:
        """Restore the module's forward."""
        del vars(self.module)["forward"]
        if self.instance_forward is not None:
            vars(self.module)["forward"] = self.instance_forward

    def __reduce__(self) -> tuple[Any, ...]:
        """Give copies and pickles of the module the original forward."""
        return getattr, (self.module, "forward")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split the inputs, compute the shares, join the outputs on the first device."""
        if running_part()[-1]:
            return self.original(*args, **kwargs)
        self.is_called = True
        names = itertools.chain(self.names, map(str, itertools.count(len(self.names) + 1)))
        positional = dict(zip(names, args, strict=False))
        has_batch, shares = max(self.batch_sizes or (), default=1) > 1, []
        if self.batch_sizes and has_batch:
            arguments = positional | kwargs
            shares = split(arguments, self.devices, self.batch_sizes, self.whole_inputs)
        self.last_sizes = [size for _, size in shares]
        if len(shares) < 2:
            if not self.has_warned and (has_batch or self.batch_sizes == ()):
                self.has_warned = True
                log.warning(IDLE, type(self.module).__name__, self.devices[0])
            return self.original(*args, **kwargs)
        gpus = dict.fromkeys(device.index for device in self.devices if device.type == "cuda")
        reseed_like_seeded([torch.cuda.default_generators[index] for index in gpus])
        # All copies are requested before the first forward starts.
        root, *others = self.devices[: len(shares)]
        copies = [{}, *(copied(self.module, root, device) for device in others)]
        before, outputs, num_before = _part.get(), list[Any](), 0
        try:
            for i, (share, size) in enumerate(shares):
                _part.set((i, num_before, size))
                num_before += size
                share_args = [share.pop(name) for name in positional]
                outputs.append(self.compute([root, *others][i], copies[i], share_args, share))
        finally:
            _part.set(before)
        return join(outputs, self.last_sizes, self.scalar_outputs)

    def compute(
        self, device: torch.device, tensors: dict[str, Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Call the original forward on a device, with these copies of parameters and buffers."""
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if not tensors:
                return self.original(*args, **kwargs)
            call = _Call(self.module, self.original, device)
            return functional_call(call, tensors, (args, kwargs), tie_weights=False)


class _Call(nn.Module):
    """Call a module's forward without its hooks, which the split call has run already."""

    def __init__(self, module: nn.Module, forward: Any, device: torch.device) -> None:
        super().__init__()
        self.module, self.original, self.device = module, forward, device

    def forward(self, args: Any, kwargs: Any) -> Any:
        with computing_on(self.module, self.device):
            return self.original(*args, **kwargs)


def copied(module: nn.Module, root: torch.device, device: torch.device) -> dict[str, Tensor]:
    """Copy the parameters and buffers on `root` to another device, by their names in `_Call`.

    Gradients of the copies flow back to the parameters. A submodule with two names is copied under
    the first alone: ``functional_call`` would leave the copy in place of its parameter.
    """
    call, by_id, tensors = _Call(module, None, device), dict[int, Tensor](), dict[str, Tensor]()
    for prefix, owner in call.named_modules():
        own = owner.named_parameters(prefix, recurse=False, remove_duplicate=False)
        buffers = owner.named_buffers(prefix, recurse=False, remove_duplicate=False)
        for name, tensor in itertools.chain(own, buffers):
            if tensor.device == root:
                if id(tensor) not in by_id:  # tied parameters stay tied
                    by_id[id(tensor)] = tensor.to(device, non_blocking=True, copy=True)
                tensors[name] = by_id[id(tensor)]
    return tensors


def reseed_like_seeded(generators: Sequence[torch.Generator]) -> None:
    """Reseed what `torch.manual_seed` has seeded alike: all GPUs would drop the same units."""
    for offset, generator in enumerate(generators[1:], start=1):
        if generator.initial_seed() == generators[0].initial_seed():
            generator.manual_seed((generator.initial_seed() + offset) % 2**63)
