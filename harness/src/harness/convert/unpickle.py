"""Read a pickle as data: nothing that it names is imported, nothing that it asks for is called.

In: an open file, at the pickle's first byte. Out: dicts, lists, numbers and texts; Tensors, whose
bytes stay in the file; and an Inert in place of every call that is not one of the few in _CALLS.
"""

import pickle
import re
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar, NamedTuple

from .tensors import DTYPES, Budget, CheckpointError, Record, Tensor

RecordOf = Callable[[str, int], Record]  # (storage key, number of bytes) -> the bytes

_STORAGES = {dtype.storage: name for name, dtype in DTYPES.items() if dtype.storage}
_STORAGES["UntypedStorage"] = "uint8"
_CHARGED_AT_ONCE = 1024  # opcodes


class Global(str):
    """The name of a class or function, "module.name"."""

    __slots__ = ()


class Storage(NamedTuple):
    """The bytes of tensors, and their type."""

    record: Record
    dtype: str


class Inert:
    """Stand-in for the result of a call, of which the name and the state are kept."""

    __slots__ = ("name", "state")

    def __init__(self, name: Any) -> None:
        self.name = name if isinstance(name, Global) else "?"
        self.state: Any = None

    def append(self, *_: Any) -> None:
        """Keep no items."""

    extend = __setitem__ = append


class Dict(dict[Any, Any]):
    """A dict or an OrderedDict, each of whose keys is a text or an Inert.

    A file could choose numbers that collide, or nested tuples, whose hash takes exponential time.
    """

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key if isinstance(key, str | Inert) else Inert("?"), value)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any, dtype: str = "") -> Any:
    is_lazy = any(rest[2:])  # conj or neg; before it are requires_grad and hooks
    kind = dtype.removeprefix("torch.") or getattr(storage, "dtype", None)
    if not isinstance(storage, Storage) or is_lazy or kind not in DTYPES:  # quantized, for one
        return Inert(Global("torch._utils._rebuild_tensor"))
    return Tensor(kind, shape, stride, offset, storage.record)


# The only calls that are understood, and what each stands for.
_CALLS: dict[str, Callable[..., Any]] = {
    "__builtin__.set": lambda items=(): items,
    "builtins.set": lambda items=(): items,
    "collections.OrderedDict": Dict,  # its items follow
    "torch._utils._rebuild_parameter": lambda tensor, *rest: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *rest: tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": lambda *args: _tensor(*args[:6], *args[7:], dtype=args[6]),
}
# What torch.load calls also with a number of bytes or elements, which are then allocated.
_ALLOCATES = re.compile(r"(__builtin__|builtins)\.bytearray|torch\.(\w+\.)*\w*(Tensor|Storage)")
# Opcodes that torch.save does not use: of text, of protocols 0 and 1, and of named arguments.
_REFUSED = b"pgILFSVidoP\x92"


class InertUnpickler(pickle._Unpickler):
    """Python's own unpickler, protocols 2 to 5, with every call replaced by data.

    The C unpickler cannot be the base, since its opcodes cannot be overridden.
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

    def load(self) -> Any:
        """Return the object that the pickle describes."""
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        self.read, self.readline = self._file.read, self._file.readline
        num_opcodes = charged = 0
        while (opcode := self._file.read(1)) != pickle.STOP:
            num_opcodes += 1
            if num_opcodes % _CHARGED_AT_ONCE == 0:
                cost = Budget.OPCODE * (num_opcodes + len(self.memo))
                self.budget.spend(cost - charged)
                charged = cost
            self.dispatch[opcode[0]](self)
        return self.stack.pop()

    def find_class(self, module: str, name: str) -> Global:
        """Return the name alone."""
        self.budget.spend(len(module) + len(name))  # honest pickles name each class once
        return Global(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return the Storage that torch.save means."""
        _, storage, key, _, numel = pid
        is_sized = type(numel) is int and 0 <= numel < 1 << 63
        if not (isinstance(storage, Global) and isinstance(key, str) and is_sized):
            raise CheckpointError("damaged: a storage without a name, a type or a length")
        dtype = _STORAGES.get(storage.rpartition(".")[2])
        if dtype is None:  # quantized
            return Inert(storage)
        self.budget.spend(len(key))
        return Storage(self.record_of(key, DTYPES[dtype].size * numel), dtype)

    def _reduce(self) -> None:
        args, func = self.stack.pop(), self.stack.pop()
        call = _CALLS.get(func) if isinstance(func, Global) else None
        has_size = type(args) is tuple and any(type(arg) is int for arg in args)
        if has_size and isinstance(func, Global) and _ALLOCATES.fullmatch(func):
            raise CheckpointError(f"damaged: {func} makes bytes that are not in the file")
        # An OrderedDict of given items would be a copy, which a few bytes could ask for again.
        if call is None or type(args) is not tuple or (call is Dict and args):
            self.append(Inert(func))
        else:
            self.budget.spend(len(args))
            self.append(call(*args))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state

    dispatch[pickle.FRAME[0]] = lambda self: self._file.read(8)  # a length, which is not needed
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(Dict())
    # Sets are read as lists, so that nothing in them is hashed.
    dispatch[pickle.EMPTY_SET[0]] = dispatch[pickle.EMPTY_LIST[0]]
    dispatch[pickle.ADDITEMS[0]] = dispatch[pickle.APPENDS[0]]
    dispatch[pickle.FROZENSET[0]] = dispatch[pickle.LIST[0]]
    # A bytearray would be allocated before it turns out that the file is shorter.
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]
