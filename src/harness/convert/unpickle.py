"""Read a pickle as data: nothing that it names is imported, nothing that it asks for is called."""

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from .tensors import DTYPES, CheckpointError, Record, Tensor, parsing

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


# Any other key is kept by identity: hashing nested tuples can take exponential time.
_KEYS = (str, int, float, bytes, type(None), Inert)


def _key(key: Any) -> Any:
    return key if isinstance(key, _KEYS) else Inert(Global("key"), key)


def _ordered_dict(items: Iterable[tuple[Any, Any]] = ()) -> "OrderedDict[Any, Any]":
    return OrderedDict((_key(key), value) for key, value in items)


def _tensor(
    storage: tuple[Record, str] | Inert,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: Any = None,
    bits: Any = None,
) -> Tensor | Inert:
    if isinstance(storage, Inert):
        return Inert(Global(f"torch._utils._rebuild_tensor of {storage.name}"))
    record, dtype = storage
    negate = _BITS[tuple(sorted(bit for bit, is_set in (bits or {}).items() if is_set))]
    return Tensor(dtype, tuple(shape), tuple(stride), offset, record, negate=negate)


def _tensor_v3(storage: Any, *rest: Any) -> Tensor | Inert:
    *geometry, dtype = rest[:6]
    name = dtype.removeprefix("torch.")
    if name not in DTYPES or isinstance(storage, Inert):
        return Inert(Global(f"torch._utils._rebuild_tensor_v3 of {name}"))
    return _tensor((storage[0], name), *geometry, *rest[6:])


def _device_tensor(tensor: Tensor, dtype: Any, *rest: Any) -> Tensor | Inert:
    if not isinstance(dtype, str):  # its text could be endless
        raise CheckpointError("damaged: a tensor without an element type")
    as_saved = dtype == f"torch.{tensor.dtype}"
    return tensor if as_saved else Inert(Global(f"torch._utils._rebuild_device_tensor of {dtype}"))


def _first(value: Any = (), *rest: Any) -> Any:
    return value


# The only calls that are understood, and what each stands for. All others give an Inert.
_CALLS: dict[str, Callable[..., Any]] = {
    "builtins.set": _first,
    "__builtin__.set": _first,
    "torch.Size": _first,
    "torch.nn.parameter.Parameter": _first,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": lambda *args: OrderedDict(),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _device_tensor,
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

    def __init__(self, file: Any, record_of: Callable[[str, int, int], Record]) -> None:
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
        if not is_named or type(numel) is not int or numel < 0:
            raise CheckpointError("damaged: a storage without a name, a type or a length")
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
        elif isinstance(target, OrderedDict) and isinstance(state, dict) and "_metadata" in state:
            vars(target)["_metadata"] = state["_metadata"]

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_key(key)] = value

    def _setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_key(key)] = value

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append(dict(zip(map(_key, items[::2]), items[1::2], strict=True)))

    dispatch[pickle.REDUCE[0]] = dispatch[pickle.NEWOBJ[0]] = _reduce
    dispatch[pickle.NEWOBJ_EX[0]] = _newobj_ex
    dispatch[pickle.BUILD[0]] = _build
    dispatch[pickle.SETITEM[0]] = _setitem
    dispatch[pickle.SETITEMS[0]] = _setitems
    dispatch[pickle.DICT[0]] = _dict
    # Sets are read as lists, for the same reason as _KEYS.
    dispatch[pickle.EMPTY_SET[0]] = dispatch[pickle.EMPTY_LIST[0]]
    dispatch[pickle.ADDITEMS[0]] = dispatch[pickle.APPENDS[0]]
    dispatch[pickle.FROZENSET[0]] = dispatch[pickle.LIST[0]]
    # A bytearray is allocated, and cleared, before it turns out that the file is shorter.
    dispatch[pickle.BYTEARRAY8[0]] = dispatch[pickle.BINBYTES8[0]]


def no_storage(key: str, itemsize: int, numel: int) -> Record:
    """Refuse tensors where none belong."""
    raise CheckpointError("damaged: a tensor where none belongs")


@parsing("its pickle")
def unpickle(file: Any, record_of: Callable[[str, int, int], Record] = no_storage) -> Any:
    """Return the next object of `file` as dicts, lists, numbers, Tensors and Inerts.

    Args:
        file: opened for reading.
        record_of: (storage key, element size in bytes, number of elements) -> its Record.

    Raises:
        CheckpointError: the bytes are not a well-formed pickle.
    """
    return InertUnpickler(file, record_of).load()
