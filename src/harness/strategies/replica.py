"""A module on another device, with differentiable copies of its parameters."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from harness.upstream.replication import own_tensors

from .rebinding import Rebinding

# What every module has for its hooks, mostly empty.
_INTERNAL = frozenset(nn.Module().__dict__)
_UNCHANGED = frozenset({bool, int, float, str, type(None), set})


class Substitute:
    """A callable in place of a module's forward; replicas use the original."""

    original: Callable[..., Any]


class Replica:
    """Twins of a module and its submodules that share everything with them but the tensors.

    `refresh` fills the twins from the originals, so that they follow every change between two
    calls: optimizer steps, train() and eval(), replaced attributes, frozen parameters. Gradients
    of the copies flow to the original parameters. What forward writes into a twin (running
    statistics, cached attributes) is lost.

    Metrics have no twins: they are updated in the step, on the whole batch.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self._originals = _replicated(module)
        self._twins = {id(m): object.__new__(type(m)) for m in self._originals}
        self._copied: dict[int, Any] = {}  # tied tensors and shared containers stay shared

    def fits(self) -> bool:
        """Whether the module still consists of the submodules it had."""
        now = _replicated(self.module)
        return len(now) == len(self._twins) and all(
            type(self._twins.get(id(m))) is type(m) for m in now
        )

    def refresh(self, root: torch.device) -> nn.Module:
        """Copy everything that is on `root` to this device and return the module's twin."""
        self.release()  # before copying, or the device would hold two sets of parameters
        self._copied, self._rebind = {}, Rebinding(self._twins)
        for module in self._originals:
            sparse = bool(getattr(module, "sparse", False))  # an embedding's sparse gradients
            for tensor in own_tensors(module):
                self._tensor(tensor, root, sparse)
        for module in self._originals:
            twin = self._twins[id(module)].__dict__
            for name, value in module.__dict__.items():
                if isinstance(value, Tensor):
                    twin[name] = self._tensor(value, root)
                elif name not in _INTERNAL or value:
                    twin[name] = self._attribute(value, root)
                else:
                    twin[name] = value
        return self._twins[id(self.module)]

    def release(self) -> None:
        """Forget the copies; what autograd still needs stays with the graph."""
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
        """The twin's value.

        Of the tensors in containers only registered ones are copied: a module may collect the
        outputs of an epoch in a list, which are not for forward.
        """
        kind = type(value)
        if kind in _UNCHANGED:
            return value
        if id(value) in self._copied:
            return self._copied[id(value)]
        if kind in (dict, OrderedDict):
            items: dict[Any, Any] = kind()
            self._copied[id(value)] = items  # before its items: it may contain itself
            items.update((key, self._attribute(item, root)) for key, item in value.items())
            return items
        if kind in (list, tuple):
            return kind(self._attribute(item, root) for item in value)
        if kind is torch.device:
            return self.device if value == root else value
        if isinstance(value, Substitute):
            return self._attribute(value.original, root)
        return self._rebind(value)


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
