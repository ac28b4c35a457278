"""Methods, closures and partials of a module, bound to its replica instead."""

import functools
import types
from typing import Any

from torch import nn

_CALLABLES = frozenset({types.MethodType, types.FunctionType, functools.partial})


class Rebinding:
    """Finds the replica's counterpart of modules and of callables that lead to one.

    What torch.compile makes of a module is such a closure, too.

    Args:
        twins: the replica's modules, by the id of the original's.
    """

    def __init__(self, twins: dict[int, nn.Module]) -> None:
        self.twins = twins
        self._known: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        """The counterpart, or the value itself where there is none."""
        if type(value) not in _CALLABLES:
            return self.twins.get(id(value), value)
        if id(value) not in self._known:
            self._known[id(value)] = value  # a closure may contain itself
            self._known[id(value)] = self._rebound(value)
        return self._known[id(value)]

    def _rebound(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            owner = self(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            keywords = {name: self(item) for name, item in value.keywords.items()}
            return functools.partial(self(value.func), *map(self, value.args), **keywords)
        old = [_content(cell) for cell in value.__closure__ or ()]
        new = [self(content) for content in old]
        if all(a is b for a, b in zip(old, new, strict=True)):
            return value
        cells = tuple(map(types.CellType, new))
        code, names = value.__code__, value.__globals__
        function = types.FunctionType(code, names, value.__name__, value.__defaults__, cells)
        function.__kwdefaults__ = value.__kwdefaults__
        function.__dict__.update(value.__dict__)
        return function


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None
