"""A module on another device, with differentiable copies of its parameters."""

import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from harness.upstream.replication import own_tensors

# Attributes that every module has for its hooks; most of them are empty.
INTERNAL = frozenset(nn.Module().__dict__)
# These are shared with the replica as they are.
_UNCHANGED = frozenset({bool, int, float, str, type(None), set})
_CALLABLES = frozenset({types.MethodType, types.FunctionType, functools.partial})


class Substitute:
    """A callable that replaces a module's forward; replicas use the original."""

    original: Callable[..., Any]


class Replica:
    """Twins of a module and its submodules, which share everything but the tensors with them.

    `refresh` fills the twins from the originals, so that they follow every change between two
    calls: optimizer steps, train() and eval(), replaced attributes, frozen parameters. Gradients
    of the copies flow to the original parameters. What forward writes into a twin, such as
    running statistics, is lost. Metrics have no twins: the step updates them on the whole batch.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self._originals = _replicated(module)
        self._twins = {id(m): object.__new__(type(m)) for m in self._originals}
        self._copied: dict[int, Any] = {}  # so that tied tensors and shared containers stay shared
        self._rebound: dict[int, Any] = {}

    def fits(self) -> bool:
        """Whether the module still consists of the submodules it had."""
        now = _replicated(self.module)
        return len(now) == len(self._twins) and all(
            type(self._twins.get(id(m))) is type(m) for m in now
        )

    def refresh(self, root: torch.device) -> nn.Module:
        """Copy everything that is on `root` to this device and return the module's twin."""
        self.release()  # else the device would hold two sets of parameters
        self._copied, self._rebound = {}, {}
        for module in self._originals:
            sparse = bool(getattr(module, "sparse", False))  # an embedding's sparse gradients
            for tensor in own_tensors(module):
                self._tensor(tensor, root, sparse)
        for module in self._originals:
            twin = self._twins[id(module)].__dict__
            for name, value in module.__dict__.items():
                if isinstance(value, Tensor):
                    twin[name] = self._tensor(value, root)
                elif name not in INTERNAL or value:
                    twin[name] = self._attribute(value, root)
                else:
                    twin[name] = value
        return self._twins[id(self.module)]

    def release(self) -> None:
        """Drop the copies; the graph keeps those that autograd still needs."""
        self._copied = {}
        for twin in self._twins.values():
            twin.__dict__.clear()

    def _tensor(self, tensor: Tensor, root: torch.device, sparse: bool = False) -> Tensor:
        if tensor.device != root:
            return tensor
        if id(tensor) not in self._copied:
            self._copied[id(tensor)] = (
                _SparseCopy.apply(tensor, self.device)  # type: ignore[no-untyped-call]
                if sparse
                else tensor.to(self.device, non_blocking=True, copy=True)
            )
        copied: Tensor = self._copied[id(tensor)]
        return copied

    def _attribute(self, value: Any, root: torch.device) -> Any:
        """The twin's value of an attribute.

        Of the tensors in containers only parameters and buffers are copied: a module may collect
        the outputs of an epoch in a list, which forward does not read.
        """
        kind = type(value)
        if kind in _UNCHANGED:
            return value
        if id(value) in self._copied:
            return self._copied[id(value)]
        if kind in (dict, OrderedDict):
            items: dict[Any, Any] = kind()
            self._copied[id(value)] = items  # first, because the container may contain itself
            items.update((key, self._attribute(item, root)) for key, item in value.items())
            return items
        if kind in (list, tuple):
            return kind(self._attribute(item, root) for item in value)
        if kind is torch.device:
            return self.device if value == root else value
        if isinstance(value, Substitute):
            return self._attribute(value.original, root)
        return self._counterpart(value)

    def _counterpart(self, value: Any) -> Any:
        """The twin of a module, or a method, closure or partial that is bound to twins instead.

        A compiled module is such a closure, too. Anything else is its own counterpart.
        """
        if type(value) not in _CALLABLES:
            return self._twins.get(id(value), value)
        if id(value) not in self._rebound:
            self._rebound[id(value)] = value  # a closure may contain itself
            self._rebound[id(value)] = self._bound_to_twins(value)
        return self._rebound[id(value)]

    def _bound_to_twins(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            owner = self._counterpart(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            keywords = {name: self._counterpart(item) for name, item in value.keywords.items()}
            positional = map(self._counterpart, value.args)
            return functools.partial(self._counterpart(value.func), *positional, **keywords)
        old = [_content(cell) for cell in value.__closure__ or ()]
        new = [self._counterpart(content) for content in old]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return value
        cells = tuple(map(types.CellType, new))
        code, names = value.__code__, value.__globals__
        function = types.FunctionType(code, names, value.__name__, value.__defaults__, cells)
        function.__kwdefaults__ = value.__kwdefaults__
        function.__dict__.update(value.__dict__)
        return function


def _replicated(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if not isinstance(m, Metric)]


class _SparseCopy(torch.autograd.Function):
    """`Tensor.to` for sparse gradients; slower, as it is written in Python."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.source = tensor.device
        return tensor.to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.source), None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
