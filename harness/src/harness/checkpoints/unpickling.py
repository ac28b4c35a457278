"""Read what torch.load(weights_only=True) refuses, and execute nothing: a `pickle_module` for it.

The converter's unpickler reads the file as data: an `Inert` for each call that is asked for. Then
the calls are made that ``CALLS``, or torch's own list, has; the others become a `StandIn`. No name
in the file is imported or looked up.
"""

import pickle
import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, ClassVar

import numpy as np
import torch

from harness.checkpoints.stand_in import StandIn
from harness.convert.unpickle import Global, Inert, InertUnpickler
from harness.upstream.plain_globals import plain_globals

TYPES: dict[str, type] = {
    f"{kind.__module__}.{kind.__name__}": kind
    for kind in (bool, dict, float, int, list, set, str, np.ndarray)
}
DTYPE = r"[<>|][biufcSUmM]\d*(\[\d+[A-Za-z]+\])?"  # all but Python objects and structures
# What the converter reads as something else.
NATIVE = (pickle.EMPTY_DICT, pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET)
STORAGE = Global("storage")  # a name of the file has a dot
WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):  # any other would be looked up
        raise ValueError(encoding)
    return text.encode("latin1")


def _dtype(state: Any, code: str, *_: Any) -> Any:
    order, times = state[1], state[8:]
    if times:
        base, number, *_ = times[0][1]
        code = f"{code}[{number}{base.decode()}]"
    if not re.fullmatch(DTYPE, order + code):
        raise TypeError("objects or a structure")
    return np.dtype(order + code)


def _array(state: Any, kind: Any, *_: Any) -> Any:
    _version, shape, dtype, is_fortran, content = state
    if kind is not np.ndarray:
        raise TypeError("a kind of array of its author")
    return _elements(shape, dtype, content, "F" if is_fortran else "C").copy(order="K")


def _elements(shape: Any, dtype: Any, content: Any, order: Any = "C") -> Any:
    if not isinstance(dtype, np.dtype) or type(content) is not bytes:
        raise TypeError("NumPy would take bytes for the addresses of objects")
    return np.ndarray(shape, dtype, content, order=order)


# The calls that are made, besides torch's.
KINDS = (
    *(Counter, OrderedDict, complex, date, datetime, Decimal, defaultdict, deque, frozenset),
    *(range, set, slice, time, timedelta, timezone),
)
CALLS: dict[str, Callable[..., Any]] = {
    f"{kind.__module__}.{kind.__name__}": kind for kind in KINDS
}
CALLS |= {
    "_codecs.encode": _encode,
    "builtins.bytearray": lambda content=b"": bytearray() + content,  # a number: its length
    "builtins.bytes": lambda: b"",
    "numpy.dtype": _dtype,
}
for path in (PosixPath, PurePosixPath, PureWindowsPath, WindowsPath):
    for module in ("pathlib", "pathlib._local"):  # the latter since Python 3.13
        CALLS[f"{module}.{path.__name__}"] = path
for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # the latter since NumPy 2
    CALLS[f"{module}._reconstruct"] = _array
    CALLS[f"{module}.scalar"] = lambda dtype, content: _elements((), dtype, content)[()]
TAKE_STATE = (_array, _dtype)


def _known(name: str) -> Callable[..., Any] | None:
    calls = ("torch.Size", "torch.device", "torch.serialization._get_layout")
    if name in calls or name.startswith("torch._utils._rebuild_"):
        return plain_globals().get(name)
    return CALLS.get(name)


def _is_odd(argument: Any) -> bool:
    """Whether an argument is no plain value, or the hooks of a tensor."""
    return isinstance(argument, StandIn) or (type(argument) is OrderedDict and bool(argument))


class Unpickler(InertUnpickler):
    """Give plain values, tensors, NumPy arrays and the standard library's containers."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = InertUnpickler.dispatch | {
        opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in NATIVE
    }
    max_text = sys.maxsize

    def __init__(self, file: Any, **_: Any) -> None:
        super().__init__(file, None)
        self.built: dict[int, tuple[Any, Any]] = {}  # by id: what was read, what it has become
        self.odd: list[str] = []  # the names of what was not built

    def load(self) -> Any:
        """The next object of the file."""
        return self.build(super().load())

    def find_class(self, module: str, name: str) -> Any:
        """Return the name alone, or one of torch's constants, such as ``torch.float32``."""
        module, name = NAME_MAPPING.get(
            (module, name), (IMPORT_MAPPING.get(module, module), name)
        )  # as Python 2 called them, whose protocol torch.save uses
        found = plain_globals().get(f"{module}.{name}")
        is_constant = found is torch.UntypedStorage or not (found is None or callable(found))
        return found if is_constant else Global(f"{module}.{name}")

    def _call(self, func: Any, args: Any) -> Inert:
        if func != WITH_ATTRIBUTES:
            return Inert(func, args)
        func, kind, args, state = args
        tensor = Inert(func if kind == "torch.Tensor" else kind, args)
        tensor.state = state
        return tensor

    def _storage(self) -> None:
        self.append(Inert(STORAGE, self.stack.pop()))

    dispatch[pickle.BINPERSID[0]] = _storage

    def build(self, value: Any) -> Any:
        """Make all calls in a value; its lists, dicts and sets stay the same objects."""
        kind = type(value)
        if kind is Global:
            return TYPES.get(value) or self.stand_in(value)
        if kind not in (Inert, list, tuple, dict, set, frozenset):
            return value
        if id(value) not in self.built:
            self.built[id(value)] = value, self._built(value)
        return self.built[id(value)][1]

    def _built(self, value: Any) -> Any:
        if isinstance(value, Inert):
            return self._made(value)
        if isinstance(value, (tuple, frozenset)):
            return type(value)(map(self.build, value))
        self.built[id(value)] = value, value  # it may hold itself
        items = [self.build(item) for item in (value.items() if type(value) is dict else value)]
        value.clear()
        (value.extend if type(value) is list else value.update)(items)
        return value

    def _made(self, inert: Inert) -> Any:
        if inert.name == STORAGE:
            return self.persistent_load(self.build(inert.args))
        call = _known(inert.name)
        if call is None:
            return self.stand_in(inert.name)
        self.built[id(inert)] = inert, StandIn(inert.name)  # it is no argument of its own
        args, state = self.build(inert.args), self.build(inert.state)
        try:
            if any(map(_is_odd, args)):
                raise TypeError("plain values are expected")
            made = call(state, *args) if call in TAKE_STATE else call(*args)
            if state is not None and call not in TAKE_STATE:
                vars(made).update(state)  # as the `_metadata` of a state_dict
        except Exception:  # what the function would refuse from its author as well
            kinds = [arg for arg in inert.args if isinstance(arg, Global)]  # as numpy.ndarray
            return self.stand_in(kinds[0] if kinds else inert.name)
        self.built[id(inert)] = inert, made
        if inert.items:
            (made.extend if type(made) is deque else made.update)(self.build(inert.items))
        return made

    def stand_in(self, name: str) -> StandIn:
        """Name what is not built."""
        self.odd.append(name)
        return StandIn(name)
