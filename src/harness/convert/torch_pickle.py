"""Write the pickle inside a .pt file, without torch."""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from .layout import Blob, Place
from .tensors import DTYPES, Tensor


class _Name(str):
    """A global, "module.name", which is written and not looked up."""

    def __call__(self) -> None: ...


class _Call(NamedTuple):
    function: _Name
    arguments: tuple[Any, ...]


class _Storage(NamedTuple):
    pid: tuple[Any, ...]


class _Pickler(pickle._Pickler):
    """Writes torch's own pickles without torch."""

    write: Callable[[bytes], None]
    memoize: Callable[[object], None]

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, _Storage) else None

    def reducer_override(self, obj: Any) -> Any:
        return tuple(obj) if isinstance(obj, _Call) else NotImplemented

    def _save_name(self, obj: _Name) -> None:
        module, _, name = obj.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
        self.memoize(obj)

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, _Name: _save_name}


def pickled_state(
    tensors: Mapping[str, Tensor],
    blobs: list[Blob],
    places: Mapping[str, Place],
    metadata: Mapping[str, Any],
) -> bytes:
    """Return the pickle of an OrderedDict of CPU tensors; blob i is the storage "i"."""
    state: OrderedDict[str, _Call] = OrderedDict()
    for name, tensor in tensors.items():
        index, offset, stride = places[name]
        dtype, numel = blobs[index].dtype, blobs[index].tensor.numel
        hooks: OrderedDict[str, Any] = OrderedDict()
        geometry = offset, tensor.shape, stride, False, hooks
        if kind := DTYPES[dtype].storage:
            storage = _Storage(("storage", _Name(f"torch.{kind}"), str(index), "cpu", numel))
            state[name] = _Call(_REBUILD_V2, (storage, *geometry))
        else:
            untyped = _Name("torch.storage.UntypedStorage")
            storage = _Storage(("storage", untyped, str(index), "cpu", blobs[index].num_bytes))
            state[name] = _Call(_REBUILD_V3, (storage, *geometry, _Name(f"torch.{dtype}")))
    if metadata:
        vars(state)["_metadata"] = OrderedDict(metadata)
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(state)
    return file.getvalue()


_REBUILD_V2 = _Name("torch._utils._rebuild_tensor_v2")
_REBUILD_V3 = _Name("torch._utils._rebuild_tensor_v3")
