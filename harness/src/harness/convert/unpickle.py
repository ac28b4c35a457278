"""Read a pickle as data: nothing that it names is imported, nothing that it asks for is called.

In: an open file, at the pickle's first byte. Out: dicts, lists, numbers and texts; Tensors, whose
bytes stay in the file; and an Inert in place of every call that is not one of the few in _CALLS.
"""

import pickle
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, ClassVar, NamedTuple

from .tensors import DTYPES, Budget, CheckpointError, Record, Tensor, parsing

# (storage key, element size in bytes, number of elements) -> the bytes
RecordOf = Callable[[str, int, int], Record]

_STORAGES = {dtype.storage: name for name, dtype in DTYPES.items() if dtype.storage}
_STORAGES["UntypedStorage"] = "uint8"
_MAX_NAME = 1_000  # characters of a global, or of a storage's key
_MAX_ARGUMENTS = 16  # of a call that is understood
_MAX_TEXT = 1 << 16  # bytes of a text or a number; longer ones are passed over
_CHARGED_AT_ONCE = 1024  # opcodes


class Global(str):
    """The name of a class or function, "module.name"."""

    __slots__ = ()


_NOT_DENSE = Global("torch._utils._rebuild_tensor")


class Storage(NamedTuple):
    """A storage of torch.save."""

    record: Record
    dtype: str


class Inert:
    """Stand-in for the result of a call: the name, the arguments, the state, the items."""

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: Any, args: Any = ()) -> None:
        self.name = name if isinstance(name, Global) else "?"
        self.args, self.state = args, None
        self.items: Any = ()

    def append(self, value: Any) -> None:
        """Add an item."""
        self.extend((value,))

    def extend(self, values: Iterable[Any]) -> None:
        """Add items; the list is made for the few that have some."""
        self.items = self.items or []
        self.items.extend(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.append((key, value))


class Dict(dict[Any, Any]):
    """A dict or an OrderedDict, each of whose keys is a text or an Inert.

    A file could choose numbers that collide, or nested tuples, whose hash takes exponential time.
    An Inert is hashed by its identity.
    """

    __slots__ = ()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key if isinstance(key, str | Inert) else Inert("?", key), value)


def _tensor(
    storage: Storage | Inert,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: Any = None,
    bits: Any = None,
    *,
    dtype: Any = None,
) -> Tensor | Inert:
    if not isinstance(storage, Storage) or bits:  # quantized, or torch's lazy conj and neg
        return Inert(_NOT_DENSE)
    kind = storage.dtype if dtype is None else dtype.removeprefix("torch.")
    if kind not in DTYPES:
        return Inert(_NOT_DENSE)
    return Tensor(kind, shape, stride, offset, storage.record)


# The only calls that are understood, and what each stands for.
_FIRST_ARGUMENT = (
    *("__builtin__.set", "builtins.set", "torch.Size", "torch.nn.parameter.Parameter"),
    *("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"),
)
_CALLS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_FIRST_ARGUMENT, lambda value=(), *rest: value),
    "collections.OrderedDict": Dict,  # its items follow
    "collections.defaultdict": lambda _factory=None: Dict(),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": lambda *args: _tensor(*args[:6], *args[7:], dtype=args[6]),
}
# Opcodes of protocols 0 and 1, which torch.save does not use: lines of text, numbers of any length.
_TEXT_OPCODES = b"pgILFSVidoP"


class InertUnpickler(pickle._Unpickler):
    """Python's own unpickler, protocols 2 to 5, with every call replaced by data.

    The C unpickler cannot be the base, since its opcodes cannot be overridden.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        opcode: function
        for opcode, function in pickle._Unpickler.dispatch.items()
        if opcode not in _TEXT_OPCODES
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
        self.read, self.readline = self._read, self._file.readline
        num_opcodes = charged = 0
        while (opcode := self._file.read(1)) != pickle.STOP:
            num_opcodes += 1
            if num_opcodes % _CHARGED_AT_ONCE == 0:
                cost = Budget.OPCODE * (num_opcodes + len(self.memo))
                self.budget.spend(cost - charged)
                charged = cost
            self.dispatch[opcode[0]](self)
        return self.stack.pop()

    def _read(self, size: int) -> bytes:
        if size <= _MAX_TEXT:
            return self._file.read(size)
        start = self._file.tell()
        self._file.seek(size, 1)
        return b"<%d bytes at %d>" % (size, start)  # unlike any other, should it be a key

    def find_class(self, module: str, name: str) -> Global:
        """Return the name alone."""
        if len(module) + len(name) > _MAX_NAME:
            raise CheckpointError("damaged: it names a class that no code can have")
        self.budget.spend(len(module) + len(name))  # honest pickles name each class once
        return Global(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """Return the Storage that torch.save means."""
        _, storage, key, _, numel = pid
        is_sized = type(numel) is int and 0 <= numel < 1 << 63
        if not (isinstance(storage, Global) and isinstance(key, str) and is_sized):
            raise CheckpointError("damaged: a storage without a name, a type or a length")
        dtype = _STORAGES.get(storage.rpartition(".")[2])
        if dtype is None or len(key) > _MAX_NAME:  # quantized
            return Inert(storage)
        return Storage(self.record_of(key, DTYPES[dtype].size, numel), dtype)

    def _reduce(self) -> None:
        args, func = self.stack.pop(), self.stack.pop()
        if func == "torch._tensor._rebuild_from_type_v2":
            func, _type, args, _state = args
        call = _CALLS.get(func) if isinstance(func, Global) else None
        is_short = isinstance(args, tuple) and len(args) <= _MAX_ARGUMENTS
        # An OrderedDict of given items would be a copy, which a few bytes could ask for again.
        is_understood = call and is_short and not (call is Dict and args)
        self.append(call(*args) if call and is_understood else Inert(func, args))

    def _newobj_ex(self) -> None:
        self.stack.pop()  # keyword arguments
        self._reduce()

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state

    dispatch[pickle.FRAME[0]] = lambda self: self._file.read(8)  # a length, which is not needed
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce
    dispatch[pickle.NEWOBJ_EX[0]] = _newobj_ex
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(Dict())
    # Sets are read as lists, so that nothing in them is hashed.
    dispatch[pickle.EMPTY_SET[0]] = dispatch[pickle.EMPTY_LIST[0]]
    dispatch[pickle.ADDITEMS[0]] = dispatch[pickle.APPENDS[0]]
    dispatch[pickle.FROZENSET[0]] = dispatch[pickle.LIST[0]]
    # A bytearray would be allocated before it turns out that the file is shorter.
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]


@parsing("its pickle")
def unpickle(file: BinaryIO, budget: Budget, record_of: RecordOf) -> Any:
    """Return the object that the pickle at the file's position describes."""
    return InertUnpickler(file, record_of, budget).load()
