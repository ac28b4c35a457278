"""A module on another device, with differentiable copies of its parameters."""

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric


class Replica:
    """A second set of module objects that share everything with the first but its tensors.

    `refresh` fills it from the original, so that it follows every change between two calls:
    optimizer steps, train() and eval(), replaced attributes, frozen parameters. Gradients of
    the copies flow to the original's parameters. What forward writes into the replica (running
    statistics, cached attributes) is lost, as the original keeps its own.

    Metrics are not replicated: they are updated in the step, on the whole batch.
    """

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        self.original, self.device = original, device
        # Keyed by id: hashing a module may be costly, or depend on its state.
        self._modules = {id(m): m for m in original.modules() if not isinstance(m, Metric)}
        self._twins = {key: object.__new__(type(m)) for key, m in self._modules.items()}
        self._callables: dict[int, tuple[Any, Any]] = {}

    def fits(self) -> bool:
        """Whether the original still consists of the modules it had."""
        now = [m for m in self.original.modules() if not isinstance(m, Metric)]
        return len(now) == len(self._modules) and all(
            type(self._twins.get(id(m))) is type(m) for m in now
        )

    def refresh(self, root: torch.device) -> nn.Module:
        """Copy what is on `root` to this device and return the replica."""
        self.release()  # before copying, or the device would hold two sets of parameters
        filling = _Filling(self.device, root, self._twins, self._callables)
        for module in self._modules.values():
            filling.copy_registered(module)
        for key, module in self._modules.items():
            twin = self._twins[key].__dict__
            twin.update({name: filling.attribute(v) for name, v in module.__dict__.items()})
        self._callables = filling.callables
        return self._twins[id(self.original)]

    def release(self) -> None:
        """Forget the copies; what autograd still needs stays with the graph."""
        for twin in self._twins.values():
            twin.__dict__.clear()


class _Filling:
    """Translates the original's attributes to the replica's, each object once."""

    def __init__(
        self,
        device: torch.device,
        root: torch.device,
        twins: dict[int, nn.Module],
        known_callables: dict[int, tuple[Any, Any]],
    ) -> None:
        self.device, self.root, self.twins = device, root, twins
        self.known_callables = known_callables
        self.callables: dict[int, tuple[Any, Any]] = {}
        self.seen: dict[int, Any] = {}  # tied tensors and shared containers stay shared

    def copy_registered(self, module: nn.Module) -> None:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                self.tensor(tensor)

    def tensor(self, tensor: Tensor) -> Tensor:
        if tensor.device != self.root:
            return tensor
        if id(tensor) not in self.seen:
            self.seen[id(tensor)] = _copy(tensor, self.device)
        copied: Tensor = self.seen[id(tensor)]
        return copied

    def attribute(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value)
        return self.inner(value)

    def inner(self, value: Any) -> Any:
        """Like `attribute`, but of loose tensors in containers only the registered are copied.

        A module may collect the outputs of an epoch in a list; they are not for its forward.
        """
        kind = type(value)
        if kind in _UNCHANGED:
            return value
        if id(value) in self.seen:
            return self.seen[id(value)]
        if kind in (dict, OrderedDict):
            items: dict[Any, Any] = kind()
            self.seen[id(value)] = items  # before its items: it may contain itself
            items.update((key, self.inner(item)) for key, item in value.items())
            return items
        if kind in (list, tuple):
            return kind(map(self.inner, value))
        if isinstance(value, nn.Module):
            return self.twins.get(id(value), value)
        if kind is torch.device:
            return self.device if value == self.root else value
        if kind in _CALLABLES:
            return self.callable(value)
        return self.inner(value.original) if isinstance(value, Substitute) else value

    def callable(self, value: Any) -> Any:
        """Bind to the replica what was bound to the original: methods, closures, partials.

        The results are kept from one refresh to the next: torch.compile would compile a function
        that is new in every step again.
        """
        if id(value) not in self.callables:
            _, new = self.known_callables.get(id(value)) or (value, value)
            self.callables[id(value)] = (value, new)  # a closure may contain itself
            if new is value:
                self.callables[id(value)] = (value, self.rebound(value))
        return self.callables[id(value)][1]

    def rebound(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            owner = self.target(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            args, keywords = map(self.target, value.args), value.keywords.items()
            targets = {key: self.target(item) for key, item in keywords}
            return functools.partial(self.target(value.func), *args, **targets)
        cells = value.__closure__ or ()
        old = [_content(cell) for cell in cells]
        new = [self.target(content) for content in old]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return value
        names = value.__code__, value.__globals__, value.__name__, value.__defaults__
        function = types.FunctionType(*names, tuple(map(types.CellType, new)))
        function.__kwdefaults__ = value.__kwdefaults__
        function.__dict__.update(value.__dict__)
        return function

    def target(self, value: Any) -> Any:
        """The replica's counterpart of a module, or of a callable that leads to one."""
        if type(value) in _CALLABLES:
            return self.callable(value)
        return self.twins.get(id(value), value)


class Substitute:
    """A callable that stands in place of a module's forward; replicas use the original."""

    original: Callable[..., Any]


class _Copy(torch.autograd.Function):
    """`tensor.to(device, copy=True)` that also passes sparse gradients back."""

    @staticmethod
    def forward(tensor: Tensor, device: torch.device) -> Tensor:
        return tensor.to(device, non_blocking=True, copy=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.device], output: Tensor) -> None:
        ctx.source = inputs[0].device

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.source, non_blocking=True), None


_copy: Callable[[Tensor, torch.device], Tensor] = _Copy.apply
_UNCHANGED = frozenset({bool, int, float, str, type(None), set})
_CALLABLES = frozenset({types.MethodType, types.FunctionType, functools.partial})


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
