"""One call of a module, split over several devices.

In: the arguments of `forward`, which `splitting` splits by rows into chunks. The first device
computes its chunk with the module itself. Each other device uses the same module with
differentiable copies of its parameters. Out: the joined outputs, on the first device.
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

from harness.compat.networks import computing_on

from .splitting import join, split

log = logging.getLogger(__name__)

IDLE = (
    "forward() of %s is not split, so only %s computes it. Either no argument has one row per "
    "sample, or the number of samples in a batch is unknown, as in a stream of batches. "
    "Use strategy=ddp."
)
# The running chunk of a split call: its number, the rows before it, its rows. It has 0 rows
# outside of split calls. A split module inside of a split module is not split again.
_chunk = contextvars.ContextVar("chunk", default=(0, 0, 0))


def running_chunk() -> tuple[int, int, int]:
    """Return the running chunk of a split call: its number, the rows before it, its rows."""
    return _chunk.get()


class ParallelForward:
    """A split `forward`, which replaces that of a module until `remove`.

    Buffers that forward changes, such as running statistics, get the values of the first chunk.
    One thread launches the work of all devices, and GPUs compute asynchronously.

    Attributes:
        devices: one per chunk; a device may occur twice; the module lives on the first.
        whole_inputs, scalar_outputs: see `NodeParallelStrategy`.
        batch_sizes: samples of the running batch, by loader. It is empty if a loader does not count
            them. Outside of steps it is None, and calls are not split.
        last_sizes: rows of each chunk in the last call; empty if that call was not split.
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
        """Restore the original forward in copies and pickles of the module."""
        return getattr, (self.module, "forward")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split the inputs, compute each chunk on its device, join the outputs on the first."""
        if running_chunk()[-1]:
            return self.original(*args, **kwargs)
        self.is_called = True
        names = itertools.chain(self.names, map(str, itertools.count(len(self.names) + 1)))
        positional = dict(zip(names, args, strict=False))
        has_batch, chunks = max(self.batch_sizes or (), default=1) > 1, []
        if self.batch_sizes and has_batch:
            arguments = positional | kwargs
            chunks = split(arguments, self.devices, self.batch_sizes, self.whole_inputs)
        self.last_sizes = [size for _, size in chunks]
        if len(chunks) < 2:
            if not self.has_warned and (has_batch or self.batch_sizes == ()):
                self.has_warned = True
                log.warning(IDLE, type(self.module).__name__, self.devices[0])
            return self.original(*args, **kwargs)
        gpus = dict.fromkeys(device.index for device in self.devices if device.type == "cuda")
        reseed_equal_seeds([torch.cuda.default_generators[index] for index in gpus])
        # Start all copies before the first forward.
        root, *others = self.devices[: len(chunks)]
        copies = [{}, *(copy_tensors(self.module, root, device) for device in others)]
        outer_chunk, outputs, num_before = _chunk.get(), list[Any](), 0
        try:
            for i, (inputs, size) in enumerate(chunks):
                _chunk.set((i, num_before, size))
                num_before += size
                args_here = [inputs.pop(name) for name in positional]
                outputs.append(self.compute([root, *others][i], copies[i], args_here, inputs))
        finally:
            _chunk.set(outer_chunk)
        return join(outputs, self.last_sizes, self.scalar_outputs)

    def compute(
        self, device: torch.device, tensors: dict[str, Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Call the original forward on a device, with ``tensors`` in place of its parameters.

        ``tensors`` are copies of parameters and buffers by name; it is empty on the first device.
        """
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if not tensors:
                return self.original(*args, **kwargs)
            call = _Call(self.module, self.original, device)
            return functional_call(call, tensors, (args, kwargs), tie_weights=False)


class _Call(nn.Module):
    """A module's forward without its hooks: the split call has run these already."""

    def __init__(self, module: nn.Module, forward: Any, device: torch.device) -> None:
        super().__init__()
        self.module, self.original, self.device = module, forward, device

    def forward(self, args: Any, kwargs: Any) -> Any:
        with computing_on(self.module, self.device):
            return self.original(*args, **kwargs)


def copy_tensors(module: nn.Module, root: torch.device, device: torch.device) -> dict[str, Tensor]:
    """Copy a module's parameters and buffers from `root` to another device.

    Gradients of the copies flow back to the parameters. Returns the copies by their names in
    `_Call`. A submodule with two names appears only under its first name: with both names,
    ``functional_call`` would leave a copy in the module afterwards.
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


def reseed_equal_seeds(generators: Sequence[torch.Generator]) -> None:
    """Change equal seeds of GPUs to different ones. `torch.manual_seed` gives all GPUs one seed.

    With the same seed, dropout would drop the same units on each GPU.
    """
    for offset, generator in enumerate(generators[1:], start=1):
        if generator.initial_seed() == generators[0].initial_seed():
            generator.manual_seed((generator.initial_seed() + offset) % 2**63)
