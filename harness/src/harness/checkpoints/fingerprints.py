"""Checksums of Python values, by which a checkpoint sees what training has changed.

In: any value. Out: a digest that is equal for equal values, and whether it holds tensors or arrays.
Next: ``attributes``.
"""

import hashlib
import io
import itertools
import logging
import pickle
import threading
import types
import weakref
import zlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

SAMPLED_BYTES = 64 * 2**20  # of a larger tensor or array only every n-th element is read
NUM_SAMPLED = 100_000
# Packages whose objects show or record a run, and decide nothing in it.
WATCHING = ("tqdm", "rich", "tensorboard", "wandb", "mlflow", "comet_ml", "matplotlib")
# Locks and files stand for something outside; a data set gives the same sample for an index.
IGNORED = (
    *(types.ModuleType, logging.Logger, logging.Handler, io.IOBase, weakref.ref),
    *(threading.Thread, threading.Event, threading.Condition, threading.local),
    *(type(threading.Lock()), type(threading.RLock()), Dataset, DataLoader, Sampler),
)
counter = itertools.count()


class Summing(pickle.Pickler):
    """Pickles any value; checksums and names stand for what is large or cannot be pickled.

    Args:
        file: takes the pickle, which is never read.
        names: of objects that a checkpoint holds in another place, by id.
    """

    def __init__(self, file: io.BytesIO, names: dict[int, str]) -> None:
        super().__init__(file, protocol=4)
        self.names, self.has_tensors = names, False

    def reducer_override(self, obj: Any) -> Any:
        """Describe one object that is no number, text or builtin container."""
        kind = type(obj)
        if isinstance(obj, type):
            is_builtin = obj.__module__ == "builtins"
            return NotImplemented if is_builtin else text(obj.__module__, obj.__qualname__)
        if id(obj) in self.names:
            return text(self.names[id(obj)])
        if isinstance(obj, IGNORED) or kind.__module__.partition(".")[0] in WATCHING:
            return text(kind)
        if isinstance(obj, torch.Tensor) or (kind is np.ndarray and not obj.dtype.hasobject):
            self.has_tensors = True
            return text(obj.dtype, tuple(obj.shape), checksum(obj))
        if isinstance(obj, types.BuiltinFunctionType):
            return text(obj.__module__, obj.__qualname__)
        if isinstance(obj, types.FunctionType):
            return text(id(obj))
        if hasattr(kind, "__next__"):
            return text(next(counter))  # it may have moved on, and nobody can tell
        try:
            reduced = obj.__reduce_ex__(4)
        except Exception:  # whatever an author's object raises
            return text(kind, id(obj))
        return text(kind, reduced) if isinstance(reduced, str) else reduced


def text(*parts: Any) -> tuple[Any, ...]:
    """A text in the place of an object, as pickle takes it."""
    return str, (repr(parts),)


def checksum(value: Any) -> int:
    """A checksum of a tensor's or array's elements."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.layout is not torch.strided or value.is_quantized:
            file = io.BytesIO()
            torch.save(value, file)
            return zlib.crc32(file.getbuffer())
        value = value.resolve_conj().resolve_neg()
    if value.nbytes > SAMPLED_BYTES:
        value = value.reshape(-1)[:: max(1, len(value.reshape(-1)) // NUM_SAMPLED)]
    if isinstance(value, torch.Tensor):
        value = value.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def fingerprint(value: Any, names: dict[int, str]) -> tuple[Any, bool]:
    """A digest of a value, and whether it holds tensors or arrays."""
    if type(value) in (type(None), bool, int, float, str):
        return (type(value).__name__, repr(value)), False  # a NaN equals itself, 0.0 not -0.0
    file = io.BytesIO()
    summing = Summing(file, names)
    try:
        summing.dump(value)
    except Exception:  # too deep, or of an author's class that raises
        return ("object", id(value)), True
    return hashlib.blake2b(file.getbuffer(), digest_size=16).hexdigest(), summing.has_tensors
