"""Computes digests of any value, which differ where the value has changed.

In: an attribute. Out: a digest, in a time that does not grow with what the attribute holds beyond a
fixed budget: of a larger value its identity, its size and a sample are compared. Next:
``attributes`` compares digests, and packs what has changed.
"""

import hashlib
import io
import logging
import math
import pickle
import threading
import time
import types
import weakref
import zlib
from collections import deque
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from harness.checkpoints.plain import TooLargeError
from harness.kinds import REPORTING, SCALARS
from harness.upstream import num_writes

# Objects without a state of the run: handles of the system, and data sets, which give the same
# sample for an index. So are the objects of packages that only show or record a run.
IGNORED = (
    *(types.ModuleType, logging.Logger, logging.Handler, io.IOBase, weakref.ref),
    *(threading.Thread, threading.Event, threading.Condition, threading.local),
    *(type(threading.Lock()), type(threading.RLock()), Dataset, DataLoader, Sampler),
)
# What is compared by all of its values: bytes of a pickle, and of a tensor or an array in it.
MAX_PICKLED, MAX_NUMBERS = 2**20, 2**24
SAMPLE = 4096  # numbers of a large array that are compared


class DigestPickler(pickle.Pickler):
    """Pickles any value; names stand for what is large, shared or cannot be pickled.

    Args:
        file: takes the pickle, which is never read.
        named: objects that a checkpoint holds in another place, by id.
        is_bounded: of large tensors and arrays a sample is read, and their identity.
    """

    def __init__(self, file: Any, named: dict[int, str], is_bounded: bool) -> None:
        super().__init__(file, protocol=4)
        self.named, self.has_tensors = named, False
        self.is_bounded = is_bounded

    def reducer_override(self, obj: Any) -> Any:
        """Describe one object that is no number, text or builtin container."""
        kind = type(obj)
        if obj is str:  # of which ``text`` makes what it returns
            return NotImplemented
        if id(obj) in self.named:
            return text(self.named[id(obj)])
        if isinstance(obj, IGNORED) or kind.__module__.partition(".")[0] in REPORTING:
            return text(kind)
        if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            # Names are alike in all processes, and several lambdas have one.
            return text(obj.__module__, obj.__qualname__, "<" in obj.__qualname__ and id(obj))
        if hasattr(kind, "__next__"):
            return text(time.monotonic_ns())  # an iterator may have moved on, and nobody sees it
        if isinstance(obj, (Tensor, np.ndarray)):
            self.has_tensors = True
            if self.is_bounded and obj.nbytes > MAX_NUMBERS:
                return text(*outline(obj, self.named))
            if isinstance(obj, Tensor) and obj.layout is torch.strided and not obj.is_quantized:
                flat = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
                numbers = flat.view(torch.uint8).cpu().numpy().data
                return text(obj.dtype, tuple(obj.shape), zlib.crc32(numbers))
        try:
            reduced = obj.__reduce_ex__(4)
        except Exception:  # whatever an author's object raises
            return text(kind, id(obj))
        return text(kind, reduced) if isinstance(reduced, str) else reduced


def outline(value: Any, named: dict[int, str], depth: int = 3) -> tuple[Any, ...]:
    """Describe a large value by its identity, its size and a sample of what it holds."""
    kind, size = type(value), len(value) if hasattr(value, "__len__") else 0
    if kind in SCALARS:
        return (value,)
    found: tuple[Any, ...] = (kind, id(value), size)
    if isinstance(value, Tensor):
        return *found, value.dtype, tuple(value.shape), num_writes(value)
    if isinstance(value, np.ndarray):
        found += str(value.dtype), value.shape
        if isinstance(value, np.memmap) or not value.flags.writeable:
            return found  # to read from many places of a file takes long
        flat = value.reshape(-1) if value.flags.c_contiguous else value[:64]
        sample = np.ascontiguousarray(flat[:: max(1, len(flat) // SAMPLE)])
        return *found, zlib.crc32(sample.data)
    if depth == 0 or id(value) in named:
        return found
    parts: list[Any] = [*vars(value).values()] if hasattr(value, "__dict__") else []
    if isinstance(value, (list, tuple, deque)):
        parts = [value[i * size // 64] for i in range(min(size, 64))]
    elif isinstance(value, dict):
        parts = [part for item in islice(value.items(), 64) for part in item]
    elif isinstance(value, (set, frozenset)):
        parts = [*islice(value, 64)]
    return *found, *(outline(part, named, depth - 1) for part in parts)


def text(*parts: Any) -> tuple[Any, ...]:
    """Return a text that pickle writes in place of an object."""
    return str, (repr(parts),)


def digest(value: Any, named: dict[int, str], is_packed: bool = False) -> tuple[Any, bool]:
    """Return a digest, equal for equal values, and whether the value holds tensors or arrays.

    The digest of packed values is the same in all processes.
    """
    if type(value) in SCALARS:
        return (type(value).__name__, repr(value)), False  # a NaN equals itself, 0.0 not -0.0
    content = hashlib.blake2b(digest_size=16)
    num_left = math.inf if is_packed else MAX_PICKLED

    def write(data: Any) -> None:
        nonlocal num_left
        if (num_left := num_left - len(data)) < 0:
            raise TooLargeError
        content.update(data)

    pickler = DigestPickler(types.SimpleNamespace(write=write), named, not is_packed)
    pickler.fast = is_packed  # equal texts need not be one object, and nothing holds itself
    try:
        pickler.dump(value)
    except TooLargeError:
        return outline(value, named), pickler.has_tensors
    except Exception:  # too deep, or of an author's class that raises
        return ("object", id(value)), True
    return content.hexdigest(), pickler.has_tensors
