"""Read a pickle as data: nothing that it names is imported, nothing that it asks for is called.

In: an open file. Out: dicts, lists, numbers and texts; Tensors, whose bytes stay in the file; and
an Inert in place of every call that is not one of the few in _CALLS.
"""

import pickle
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from .tensors import DTYPES, Budget, CheckpointError, Record, Tensor, parsing

# (storage key, element size in bytes, number of elements) -> the bytes
RecordOf = Callable[[str, int, int], Record]

_STORAGES = {dtype.storage: name for name, dtype in DTYPES.items() if dtype.storage}
_STORAGES["UntypedStorage"] = "uint8"
_MAX_NAME = 1_000  # characters of a global, or of a storage's key
_MAX_ARGUMENTS = 16  # of a call that is understood
_CHARGED_AT_ONCE = 1024  # opcodes


class Global(str):
    """The name of a class or function, "module.name"."""

    __slots__ = ()


class Storage(NamedTuple):
    """A storage of torch.save."""

    record: Record
    dtype: str


class Inert:
    """Stand-in for the result of a call: the name, the arguments, the state, the items."""

    __slots__ = ("args", "items", "name", "state")

    def __init__(self, name: Any, args: Any = ()) -> None:
        self.name = name if isinstance(name, Global) else "?"
        self.args = args
        self.state: Any = None
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


class Key:
    """A dict's key that is not text, hashed by its identity.

    Otherwise a file could choose keys that collide, or nested tuples, whose hash takes exponential
    time.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __str__(self) -> str:
        is_short = isinstance(self.value, int | float | None) and abs(self.value or 0) < 1 << 64
        return str(self.value) if is_short else "?"


class Dict(dict[Any, Any]):
    """A dict or an OrderedDict, whose keys are texts, Inerts or Keys."""

    __slots__ = ()

    def __init__(self, items: Iterable[Any] = ()) -> None:
        for key, value in items:
            self[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key if isinstance(key, str | Inert) else Key(key), value)


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
    kind = storage.dtype if isinstance(storage, Storage) else storage.name
    if dtype is not None:
        kind = dtype.removeprefix("torch.") if isinstance(dtype, Global) else "?"
    if not isinstance(storage, Storage) or kind not in DTYPES:
        return Inert(Global(f"torch._utils._rebuild_tensor of {kind[:100]}"))
    if bits:  # torch's lazy conj and neg
        return Inert(Global("torch._utils._rebuild_tensor with lazy bits"))
    return Tensor(kind, shape, stride, offset, storage.record)


# The only calls that are understood, and what each stands for.
_FIRST_ARGUMENT = (
    *("builtins.set", "__builtin__.set", "torch.Size", "torch.nn.parameter.Parameter"),
    *("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"),
)
_CALLS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_FIRST_ARGUMENT, lambda value=(), *rest: value),
    "collections.OrderedDict": Dict,
    "collections.defaultdict": lambda *args: Dict(),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": lambda *args: _tensor(*args[:6], *args[7:], dtype=args[6]),
}


class _LongError(Exception):
    """A text or a number is longer than is read."""


class _Memo(list[Any]):
    """The pickle's memo: a list, since the keys of a dict could be made to collide."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def __setitem__(self, index: Any, value: Any) -> None:
        if (num_missing := index + 1 - len(self)) > 0:
            self.budget.spend(num_missing)
            self.extend([None] * num_missing)
        super().__setitem__(index, value)


class InertUnpickler(pickle._Unpickler):
    """Python's own unpickler, protocols 0 to 5, with every call replaced by data.

    The C unpickler cannot be the base, since its opcodes cannot be overridden.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    max_text: ClassVar[int] = 1 << 16  # bytes of a text or a number; longer ones are passed over
    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: Any, record_of: RecordOf | None, budget: Budget | None = None) -> None:
        super().__init__(file, encoding="latin1")
        self.record_of, self.budget, self._file = record_of, budget or Budget(), file
        self.memo = _Memo(self.budget)

    def load(self) -> Any:
        """Return the next object of the file."""
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        self.read, self.readline = self._read, self._readline
        num_opcodes = 0
        while (opcode := self._file.read(1)) != pickle.STOP:
            num_opcodes += 1
            if num_opcodes % _CHARGED_AT_ONCE == 0:
                self.budget.spend(Budget.OPCODE_COST * _CHARGED_AT_ONCE)
            try:
                self.dispatch[opcode[0]](self)
            except _LongError:
                self.append(Inert(Global("a long text")))
        return self.stack.pop()

    def _read(self, size: int) -> Any:
        if size > self.max_text:
            self._file.seek(size, 1)
            raise _LongError
        return self._file.read(size)

    def _readline(self) -> Any:
        line = self._file.readline(self.max_text)
        if not line.endswith(b"\n"):
            raise EOFError
        return line

    def find_class(self, module: str, name: str) -> Global:
        """Return the name alone."""
        if len(module) + len(name) > _MAX_NAME:
            raise CheckpointError("damaged: it names a class that no code can have")
        self.budget.spend(50 + len(name))  # honest pickles name each class once
        return Global(f"{module}.{name}")

    def get_extension(self, code: int) -> None:
        """Push the name alone, without a look into copyreg's registry."""
        self.append(Global(f"copyreg.extension_{code}"))

    def persistent_load(self, pid: Any) -> Any:
        """Return the Storage that torch.save means."""
        if pid[0] == "module":  # a legacy file's class, with its source text
            return pid[1]
        if len(pid) > 6:
            raise CheckpointError("damaged: a storage with more than a storage has")
        _, storage, key, _, numel, *view = pid
        is_named = isinstance(storage, Global) and isinstance(key, str | int)
        is_sized = type(numel) is int and 0 <= numel < 1 << 63
        if not (self.record_of and is_named and is_sized) or len(key := str(key)) > _MAX_NAME:
            raise CheckpointError("damaged: a storage without a name, a type, a length or a place")
        dtype = _STORAGES.get(storage.rpartition(".")[2])
        if dtype is None or any(view):  # quantized, or a view as torch 0.3 saved it
            return Inert(storage)
        return Storage(self.record_of(key, DTYPES[dtype].size, numel), dtype)

    def _instantiate(self, cls: Any, args: Any) -> None:
        self.append(self._call(cls, args))

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.append(self._call(self.stack.pop(), args))

    def _call(self, func: Any, args: Any) -> Any:
        if func == "torch._tensor._rebuild_from_type_v2":
            func, _cls, args, _state = args
        call = _CALLS.get(func) if isinstance(func, Global) else None
        if not call or len(args) > _MAX_ARGUMENTS:
            return Inert(func, args)
        if call is Dict and args:  # Python 2 gave it a list, which is copied
            self.budget.spend(Budget.PART_COST * len(args[0]))
        return call(*args)

    def _newobj_ex(self) -> None:
        self.stack.pop()  # keyword arguments
        self._reduce()

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append(Dict(zip(items[::2], items[1::2], strict=True)))

    dispatch[pickle.FRAME[0]] = lambda self: self._file.read(8)  # a length, which is not needed
    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce
    dispatch[pickle.NEWOBJ_EX[0]] = _newobj_ex
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(Dict())
    dispatch[pickle.DICT[0]] = _dict
    # Sets are read as lists, so that nothing in them is hashed.
    dispatch[pickle.EMPTY_SET[0]] = dispatch[pickle.EMPTY_LIST[0]]
    dispatch[pickle.ADDITEMS[0]] = dispatch[pickle.APPENDS[0]]
    dispatch[pickle.FROZENSET[0]] = dispatch[pickle.LIST[0]]
    # A bytearray would be allocated before it turns out that the file is shorter.
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]


@parsing("its pickle")
def unpickle(file: Any, budget: Budget, record_of: RecordOf | None = None) -> Any:
    """Return the next object of an open file; without `record_of` it may hold no tensors."""
    return InertUnpickler(file, record_of, budget).load()
