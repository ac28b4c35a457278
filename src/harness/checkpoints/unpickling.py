"""Read what torch.load(weights_only=True) refuses, and execute nothing: a `pickle_module` for it.

Plain values, tensors, NumPy arrays and the standard library's containers are built, everything
else becomes a `StandIn`. No name in the file is imported or looked up: `find_class` gives the name
itself, and a call is made only where ``CALLS``, or torch's own list, has the name.
"""

import pickle
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, ClassVar

import numpy as np
import torch

from harness.checkpoints.stand_in import StandIn, type_name
from harness.upstream.plain_globals import plain_globals

FACTORIES = {f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, int, list, set, str)}
DTYPE_KINDS = "biufcSUmM"  # all but Python objects and structures
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
TENSOR_TYPES = {"torch.Tensor": torch.Tensor, "torch.nn.parameter.Parameter": torch.nn.Parameter}


class Name(StandIn):
    """The name of a class or a function, as the file gives it."""

    __slots__ = ()


class Unbuilt(StandIn):
    """A NumPy array or dtype whose contents come later; it stays one if they are not plain."""

    __slots__ = ("_arguments",)
    _arguments: tuple[Any, ...]

    def __init__(self, type_name: str, *arguments: Any) -> None:
        super().__init__(type_name)
        object.__setattr__(self, "_arguments", arguments)


def _texts(kind: Callable[..., Any]) -> Callable[..., Any]:
    def build(*args: Any) -> Any:
        if any(type(arg) is not str for arg in args):
            raise TypeError("texts are expected")
        return kind(*args)

    return build


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):  # any other would be looked up
        raise ValueError(encoding)
    return text.encode("latin1")


def _bytearray(content: bytes = b"") -> bytearray:
    if type(content) is not bytes:  # a number would be a length
        raise TypeError("bytes are expected")
    return bytearray(content)


def _defaultdict(*factory: Any) -> defaultdict[Any, Any]:
    if factory and factory[0] is not None:
        return defaultdict(FACTORIES[type_name(factory[0])])
    return defaultdict()


def _dtype(code: str, *_: Any) -> Unbuilt:
    if not re.fullmatch(f"[{DTYPE_KINDS}][0-9]*", code):
        return Unbuilt(f"numpy.dtype {code}")
    return Unbuilt("numpy.dtype", code)


def _array(kind: Any, *_: Any) -> Unbuilt:
    return Unbuilt(type_name(kind))


def _scalar(dtype: np.dtype[Any], content: bytes) -> Any:
    return np.ndarray((), dtype, content)[()]


# The calls that are made, besides torch's. Their arguments are plain, unless ``TAKE_NAMES``.
CALLS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda: b"",
    "builtins.complex": complex,
    "builtins.frozenset": frozenset,
    "builtins.range": range,
    "builtins.set": set,
    "builtins.slice": slice,
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": _defaultdict,
    "collections.deque": deque,
    "datetime.date": date,
    "datetime.datetime": datetime,
    "datetime.time": time,
    "datetime.timedelta": timedelta,
    "datetime.timezone": timezone,
    "decimal.Decimal": _texts(Decimal),
    "numpy.dtype": _dtype,
}
for path in (PosixPath, PurePosixPath, PureWindowsPath, WindowsPath):
    for module in ("pathlib", "pathlib._local"):  # the latter since Python 3.13
        CALLS[f"{module}.{path.__name__}"] = _texts(path)
for module in ("numpy.core.multiarray", "numpy._core.multiarray"):  # the latter since NumPy 2
    CALLS[f"{module}._reconstruct"] = _array
    CALLS[f"{module}.scalar"] = _scalar
TAKE_NAMES = (_array, _defaultdict)


def _is_call_of_torch(name: str) -> bool:
    calls = ("torch.Size", "torch.device", "torch.serialization._get_layout")
    return name in calls or name.startswith("torch._utils._rebuild_")


class Unpickler(pickle._Unpickler):
    """Python's own unpickler with every opcode closed that could call or change something.

    The C unpickler is no base: its opcodes cannot be overridden.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        """Return the name alone, or one of torch's constants, such as ``torch.float32``."""
        module, name = NAME_MAPPING.get(
            (module, name), (IMPORT_MAPPING.get(module, module), name)
        )  # as Python 2 called them, whose protocol torch.save uses
        found = plain_globals().get(f"{module}.{name}")
        is_constant = found is torch.UntypedStorage or not (found is None or callable(found))
        return found if is_constant else Name(f"{module}.{name}")

    def get_extension(self, code: int) -> None:
        """Push a name: the registry of copyreg is not asked."""
        self.append(Name(f"copyreg.extension_{code}"))

    def _instantiate(self, cls: Any, args: Any) -> None:
        self.append(_call(cls, tuple(args)))

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = _call(self.stack[-1], args)

    def _newobj_ex(self) -> None:
        self.stack.pop()  # keyword arguments, which nothing that is built here takes
        self.stack.pop()
        self.stack[-1] = StandIn(_named(self.stack[-1]))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is OrderedDict and type(state) is dict:
            vars(target).update(state)  # the `_metadata` of a state_dict
        elif type(target) is Unbuilt:
            built = _built(target, state)
            for index in reversed(self.memo):  # it was remembered right before its state
                if self.memo[index] is target:
                    self.memo[index] = built
                    break
            self.stack[-1] = built
        elif not isinstance(target, StandIn):
            raise pickle.UnpicklingError(f"a {type(target).__name__} takes no state")

    def _append(self) -> None:
        item = self.stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list or type(target) is deque:
            target.extend(items)
        elif not isinstance(target, StandIn):
            raise pickle.UnpicklingError(f"a {type(target).__name__} takes no items")

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) in (dict, OrderedDict, defaultdict, Counter):
            for key, value in zip(items[::2], items[1::2], strict=True):
                target[key] = value
        elif not isinstance(target, StandIn):
            raise pickle.UnpicklingError(f"a {type(target).__name__} takes no keys")

    def _additems(self) -> None:
        items = self.pop_mark()
        if type(self.stack[-1]) is not set:
            raise pickle.UnpicklingError("only a set takes these")
        self.stack[-1].update(items)

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce
    dispatch[pickle.NEWOBJ_EX[0]] = _newobj_ex
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.APPEND[0]], dispatch[pickle.APPENDS[0]] = _append, _appends
    dispatch[pickle.SETITEM[0]], dispatch[pickle.SETITEMS[0]] = _setitem, _setitems
    dispatch[pickle.ADDITEMS[0]] = _additems
    # A bytearray is allocated, and cleared, before it turns out that the file is shorter.
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]


def _named(func: Any) -> str:
    return type_name(func) if isinstance(func, StandIn) else type(func).__name__


def _call(func: Any, args: Any) -> Any:
    """Build a plain value; whatever is not plain, or does not fit together, gives a StandIn."""
    name = _named(func)
    if type(func) is not Name or type(args) is not tuple:
        return StandIn(name)
    if name == "copyreg._reconstructor" and args:
        return StandIn(_named(args[0]))
    call = CALLS.get(name)
    if call is None and _is_call_of_torch(name):
        call = plain_globals().get(name)
    try:
        if name == FROM_TYPE:  # a tensor with attributes
            rebuild, kind, arguments, state = args
            tensor = _call(rebuild, arguments)
            if type(tensor) is TENSOR_TYPES[type_name(kind)] and type(state) is dict:
                return plain_globals()[FROM_TYPE](lambda: tensor, type(tensor), (), state)
            return StandIn(_named(kind))
        if call is None or (call not in TAKE_NAMES and any(map(_is_odd, args))):
            return StandIn(name)
        return call(*args)
    except Exception:  # a call that the function refuses
        return StandIn(name)


def _is_odd(argument: Any) -> bool:
    """Whether an argument is no plain value, or the hooks of a tensor."""
    return isinstance(argument, StandIn) or (type(argument) is OrderedDict and bool(argument))


def _built(target: Unbuilt, state: Any) -> Any:
    """A NumPy array or dtype, once its state is known: NumPy reads none of it by itself."""
    arguments: tuple[Any, ...] = object.__getattribute__(target, "_arguments")
    try:
        if arguments:
            return _built_dtype(*arguments, *state)
        _version, shape, dtype, is_fortran, content = state
        if type_name(target) == "numpy.ndarray" and type(content) is bytes:
            order: Any = "F" if is_fortran else "C"
            return np.ndarray(shape, dtype, content, order=order).copy(order="K")
    except Exception:  # what NumPy would have refused as well
        return target
    return target


def _built_dtype(
    code: str,
    version: int,
    order: str,
    subdtype: None,
    names: None,
    fields: None,
    size: int,
    alignment: int,
    flags: int,
    unit: Any = None,
) -> np.dtype[Any]:
    if unit:
        _, (base, number, _divisor, _events) = unit
        code = f"{code}[{number}{base.decode()}]"
    if subdtype or names or fields or order not in ("<", ">", "|"):
        raise TypeError("a structure")
    return np.dtype(order + code)
