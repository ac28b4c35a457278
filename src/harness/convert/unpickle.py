"""Read a pickle as data: nothing that it names is imported, nothing that it asks for is called."""

import pickle
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from .tensors import DTYPES, CheckpointError, Record, Tensor, parsing

# (storage key, element size in bytes, number of elements) -> the bytes
RecordOf = Callable[[str, int, int], Record]

_STORAGES = {dtype.storage: name for name, dtype in DTYPES.items() if dtype.storage}
_STORAGES["UntypedStorage"] = "uint8"
_BITS = {(): "", ("conj",): "imag", ("neg",): "all", ("conj", "neg"): "real"}

# A few bytes of a pickle can repeat what came before, so whatever copies needs a limit.
_MAX_NAME = 1_000  # characters of a global
_MAX_COPIED = 1_000_000  # items of all OrderedDicts that are made of a list, as Python 2 did


class Global(str):
    """The name of a class or function, "module.name"."""

    __slots__ = ()


class Inert:
    """What calling a Global would have made: the name, the arguments, the state, the items."""

    def __init__(self, name: Any, args: Any = ()) -> None:
        self.name = name[:_MAX_NAME] if isinstance(name, Global) else "?"
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []
        self.append, self.extend = self.items.append, self.items.extend

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


class Dict(dict[Any, Any]):
    """A dict, or an OrderedDict with the `_metadata` that torch gives a state_dict.

    Keys of unusual kinds are kept by identity: hashing nested tuples can take exponential time.
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.metadata: Any = {}
        for key, value in items:
            self[key] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        is_usual = isinstance(key, str | int | float | bytes | None | Inert)
        super().__setitem__(key if is_usual else Inert(Global("key"), key), value)


def _tensor(
    storage: tuple[Record, str] | Inert,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: Any = None,
    bits: Any = None,
    *,
    dtype: str = "",
) -> Tensor | Inert:
    record, kind = (None, storage.name) if isinstance(storage, Inert) else storage
    kind = dtype.removeprefix("torch.") or kind
    if record is None or kind not in DTYPES:
        return Inert(Global(f"torch._utils._rebuild_tensor of {kind}"))
    negate = _BITS[tuple(sorted(bit for bit, is_set in (bits or {}).items() if is_set))]
    return Tensor(kind, tuple(shape), tuple(stride), offset, record, negate=negate)


def _tensor_v3(*args: Any) -> Tensor | Inert:
    return _tensor(*args[:6], *args[7:], dtype=args[6])


# The only calls that are understood, and what each stands for. All others give an Inert.
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
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
}


class InertUnpickler(pickle._Unpickler):
    """Python's own unpickler, protocols 0 to 5, with every door to code closed.

    The C unpickler is no base: its opcodes cannot be overridden and a large memo index makes it
    allocate gigabytes.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: Any, record_of: RecordOf | None) -> None:
        super().__init__(file, encoding="latin1")
        self.record_of = record_of
        self._num_copied = 0

    def find_class(self, module: str, name: str) -> Global:
        """Return the name alone."""
        if len(module) + len(name) > _MAX_NAME:
            raise CheckpointError("damaged: it names a class that no code can have")
        return Global(f"{module}.{name}")

    def get_extension(self, code: int) -> None:
        """Push the name alone: the registry of copyreg is not asked."""
        self.append(Global(f"copyreg.extension_{code}"))

    def persistent_load(self, pid: Any) -> Any:
        """Return (Record, element type) for a storage of torch.save."""
        if pid[0] == "module":  # a legacy file's class, with its source text
            return pid[1]
        _, storage, key, _, numel, *view = pid
        is_named = isinstance(key, str | int) and isinstance(storage, Global)
        if not self.record_of or not is_named or type(numel) is not int or numel < 0:
            raise CheckpointError("damaged: a storage without a name, a type, a length or a place")
        dtype = _STORAGES.get(storage.rpartition(".")[2])
        if dtype is None or any(view):  # quantized, or a view as torch 0.3 saved it
            return Inert(storage)
        return self.record_of(str(key), DTYPES[dtype].size, numel), dtype

    def _instantiate(self, cls: Any, args: Any) -> None:
        self.append(self._call(cls, args))

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.append(self._call(self.stack.pop(), args))

    def _call(self, func: Any, args: Any) -> Any:
        if func == "torch._tensor._rebuild_from_type_v2":
            func, _cls, args, _state = args
        if func == "collections.OrderedDict" and args:
            self._num_copied += len(args[0])
            if self._num_copied > _MAX_COPIED:
                raise CheckpointError("damaged: its dicts hold more than any checkpoint does")
        known = _CALLS.get(func) if isinstance(func, Global) else None
        return known(*args) if known else Inert(func, args)

    def _newobj_ex(self) -> None:
        self.stack.pop()  # keyword arguments
        self._reduce()

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Inert):
            target.state = state
        elif isinstance(target, Dict) and isinstance(state, dict):
            target.metadata = state.get("_metadata")

    def _empty_dict(self) -> None:
        self.append(Dict())

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append(Dict(zip(items[::2], items[1::2], strict=True)))

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce
    dispatch[pickle.NEWOBJ_EX[0]] = _newobj_ex
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.EMPTY_DICT[0]] = _empty_dict
    dispatch[pickle.DICT[0]] = _dict
    # Sets are read as lists: nothing in them is hashed.
    dispatch[pickle.EMPTY_SET[0]] = dispatch[pickle.EMPTY_LIST[0]]
    dispatch[pickle.ADDITEMS[0]] = dispatch[pickle.APPENDS[0]]
    dispatch[pickle.FROZENSET[0]] = dispatch[pickle.LIST[0]]
    # A bytearray is allocated, and cleared, before it turns out that the file is shorter.
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]


@parsing("its pickle")
def unpickle(file: Any, record_of: RecordOf | None = None) -> Any:
    """Return the next object of an open file as dicts, lists, numbers, Tensors and Inerts.

    Without `record_of` there may be no tensors in it.
    """
    return InertUnpickler(file, record_of).load()
