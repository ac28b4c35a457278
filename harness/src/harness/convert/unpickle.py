"""Read a pickle as data: import nothing that it names, call nothing that it asks for.

In: an open file, at the pickle's first byte. Out: dicts, lists, numbers and texts, and a
``StoredTensor`` for each tensor, whose bytes stay in the file. An ``Inert`` replaces the result of
every call that ``_CALLS`` does not list.
"""

import pickle
import re
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar, NamedTuple

from .tensors import DTYPES, Budget, ByteRange, CheckpointError, StoredTensor

RecordOf = Callable[[str, int], ByteRange]  # (storage key, number of bytes) -> the bytes

_STORAGES = {dtype.storage: name for name, dtype in DTYPES.items() if dtype.storage}
_STORAGES["UntypedStorage"] = "uint8"
_CHARGED_AT_ONCE = 1024  # opcodes


class Global(str):
    """The name of a class or function, "module.name"."""

    __slots__ = ()


class Storage(NamedTuple):
    """The bytes that tensors share, and their element type."""

    record: ByteRange
    dtype: str


class Inert:
    """Stands for the result of a call that is not made: the function's name, and the state."""

    __slots__ = ("name", "state")

    def __init__(self, name: Any) -> None:
        self.name = name if isinstance(name, Global) else "?"
        self.state: Any = None

    def append(self, *_: Any) -> None:
        """Drop the items."""

    extend = __setitem__ = append


class Dict(dict[Any, Any]):
    """A dict or an OrderedDict. A key that is no text becomes an ``Inert``.

    Other keys can be an attack: numbers that collide, or nested tuples with a costly hash.
    """

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key if isinstance(key, str | Inert) else Inert("?"), value)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any, dtype: str = "") -> Any:
    is_lazy = any(rest[2:])  # conj or neg; the first two are requires_grad and hooks
    kind = dtype.removeprefix("torch.") or getattr(storage, "dtype", None)
    if not isinstance(storage, Storage) or is_lazy or kind not in DTYPES:  # or quantized
        return Inert(Global("torch._utils._rebuild_tensor"))
    return StoredTensor(kind, shape, stride, offset, storage.record)


# The only calls that the unpickler understands, each with a function that returns its result.
_CALLS: dict[str, Callable[..., Any]] = {
    "__builtin__.set": lambda items=(): items,
    "builtins.set": lambda items=(): items,
    "collections.OrderedDict": Dict,  # empty; later opcodes add its items
    "torch._utils._rebuild_parameter": lambda tensor, *rest: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *rest: tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": lambda *args: _tensor(*args[:6], *args[7:], dtype=args[6]),
}
# Calls that allocate memory if their argument is a number of bytes or elements.
_ALLOCATES = re.compile(r"(__builtin__|builtins)\.bytearray|torch\.(\w+\.)*\w*(Tensor|Storage)")
# Opcodes that torch.save never writes: text, protocols 0 and 1, and keyword arguments.
_REFUSED = b"pgILFSVidoP\x92"


class InertUnpickler(pickle._Unpickler):
    """Python's own unpickler for protocols 2 to 5, which returns data in place of calls.

    Its base is the unpickler in Python: the one in C does not let a subclass replace opcodes.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        opcode: function
        for opcode, function in pickle._Unpickler.dispatch.items()
        if opcode not in _REFUSED
    }
    stack: list[Any]
    metastack: list[list[Any]]
    memo: dict[int, Any]
    append: Callable[[Any], None]

    def __init__(self, file: BinaryIO, record_of: RecordOf, budget: Budget) -> None:
        super().__init__(file, encoding="latin1")
        self.record_of, self.budget, self._file = record_of, budget, file
        self._dtypes: dict[str, str] = {}  # of the storages

    def load(self) -> Any:
        """Return the object that the pickle describes."""
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        self.read, self.readline = self._file.read, self._file.readline
        num_opcodes = charged = 0
        while (opcode := self._file.read(1)) != pickle.STOP:
            num_opcodes += 1
            if num_opcodes % _CHARGED_AT_ONCE == 0:
                total = Budget.OPCODE * (num_opcodes + len(self.memo))
                self.budget.spend(total - charged)
                charged = total
            self.dispatch[opcode[0]](self)
        return self.stack.pop()

    def find_class(self, module: str, name: str) -> Global:
        """Return the name of a class or function, and import nothing."""
        self.budget.spend(len(module) + len(name))  # an undamaged pickle names each class once
        return Global(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return the ``Storage`` that torch.save refers to."""
        _, storage, key, _, numel = pid
        is_sized = type(numel) is int and 0 <= numel < 1 << 63
        if not (isinstance(storage, Global) and isinstance(key, str) and is_sized):
            raise CheckpointError("damaged: a storage without a name, a type or a length")
        dtype = _STORAGES.get(storage.rpartition(".")[2])
        if dtype is None:  # quantized
            return Inert(storage)
        self.budget.spend(len(key))
        if self._dtypes.setdefault(key, dtype) != dtype:  # torch.load would use one type
            raise CheckpointError(f"damaged: data/{key} is both {self._dtypes[key]} and {dtype}")
        return Storage(self.record_of(key, DTYPES[dtype].size * numel), dtype)

    def _reduce(self) -> None:
        args, func = self.stack.pop(), self.stack.pop()
        call = _CALLS.get(func) if isinstance(func, Global) else None
        has_size = type(args) is tuple and any(type(arg) is int for arg in args)
        if has_size and isinstance(func, Global) and _ALLOCATES.fullmatch(func):
            raise CheckpointError(f"damaged: {func} allocates bytes that are not in the file")
        # An OrderedDict with items is refused: a few bytes could copy a large dict many times.
        if call is None or type(args) is not tuple or (call is Dict and args):
            self.append(Inert(func))
        else:
            self.budget.spend(len(args))
            self.append(call(*args))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state

    dispatch[pickle.FRAME[0]] = lambda self: self._file.read(8)  # skip the frame's length
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(Dict())
    # Read sets as lists, so that no item is hashed.
    dispatch[pickle.EMPTY_SET[0]] = dispatch[pickle.EMPTY_LIST[0]]
    dispatch[pickle.ADDITEMS[0]] = dispatch[pickle.APPENDS[0]]
    dispatch[pickle.FROZENSET[0]] = dispatch[pickle.LIST[0]]
    # Read a bytearray as bytes: it would be allocated even if the file is shorter.
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]
