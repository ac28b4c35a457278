"""A module on another device, with differentiable copies of its parameters."""

import contextlib
import functools
import types
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

# Attributes that every module has; the dicts among them hold its parameters and buffers.
INTERNAL = frozenset(vars(nn.Module()))
REGISTERED = tuple(name for name, value in vars(nn.Module()).items() if type(value) is dict)
UNCHANGED = frozenset({bool, int, float, str, type(None), set})
CALLABLES = frozenset({types.MethodType, types.FunctionType, functools.partial})


class Replica:
    """Twins of a module and its submodules, which share everything but the tensors with them.

    `refresh` fills the twins from the originals, so that they follow every change. Gradients of the
    copies flow to the original parameters. What forward assigns to a twin's attribute is lost; what
    it appends to a list is kept. Metrics have no twins: the step updates them on the whole batch.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self._originals = _replicated(module)
        self._twins = {id(m): object.__new__(type(m)) for m in self._originals}
        self._copied: dict[int, Tensor] = {}  # so that tied tensors stay tied
        self._rebound: dict[int, Any] = {}

    def fits(self) -> bool:
        """Whether the module still consists of the submodules it had."""
        kinds = {id(m): type(m) for m in _replicated(self.module)}
        return kinds == {key: type(twin) for key, twin in self._twins.items()}

    def refresh(self, root: torch.device) -> nn.Module:
        """Copy everything that is on `root` to this device and return the module's twin."""
        self.release()  # else the device would hold two sets of parameters
        self._copied, self._rebound = {}, {}
        for module in self._originals:
            for name in REGISTERED:
                for value in vars(module)[name].values():
                    self._tensor(value, root)
        for module in self._originals:
            twin = self._twins[id(module)].__dict__
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    twin[name] = self._tensor(value, root)
                elif name == "forward":  # of a split part of a split module
                    twin[name] = self._attribute(getattr(value, "original", value), root)
                elif value or name not in INTERNAL:
                    twin[name] = self._attribute(value, root)
                else:
                    twin[name] = value
        return self._twins[id(self.module)]

    def release(self) -> None:
        """Drop the copies; the graph keeps those that autograd still needs."""
        self._copied = {}
        for twin in self._twins.values():
            twin.__dict__.clear()

    def _tensor(self, tensor: Any, root: torch.device) -> Any:
        if not isinstance(tensor, Tensor) or tensor.device != root:
            return tensor
        if id(tensor) not in self._copied:
            self._copied[id(tensor)] = tensor.to(self.device, non_blocking=True, copy=True)
        return self._copied[id(tensor)]

    def _attribute(self, value: Any, root: torch.device) -> Any:
        """The twin's value of an attribute; another container only if something in it differs."""
        kind = type(value)
        if kind in UNCHANGED:
            return value
        if id(value) in self._copied:
            return self._copied[id(value)]
        if kind in (dict, OrderedDict):
            items = kind((key, self._attribute(item, root)) for key, item in value.items())
            return value if all(items[key] is item for key, item in value.items()) else items
        if kind in (list, tuple):
            parts = kind(self._attribute(item, root) for item in value)
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
        if kind is torch.device:
            return self.device if value == root else value
        return self._counterpart(value)

    def _counterpart(self, value: Any) -> Any:
        """The twin of a module, or what is bound to twins in place of a method or a closure."""
        if type(value) not in CALLABLES:
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
        cells = [self._cell(cell) for cell in value.__closure__ or ()]
        if all(new is old for new, old in zip(cells, value.__closure__ or (), strict=True)):
            return value
        code, names = value.__code__, value.__globals__
        function = types.FunctionType(code, names, value.__name__, value.__defaults__, (*cells,))
        function.__kwdefaults__ = value.__kwdefaults__
        function.__dict__.update(value.__dict__)
        return function

    def _cell(self, cell: types.CellType) -> types.CellType:
        with contextlib.suppress(ValueError):  # not yet assigned
            if (content := self._counterpart(cell.cell_contents)) is not cell.cell_contents:
                return types.CellType(content)
        return cell


def _replicated(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if not isinstance(m, Metric)]
