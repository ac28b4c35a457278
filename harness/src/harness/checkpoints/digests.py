"""Compute digests of any value, which differ if the value has changed.

In: an attribute. Out: a digest, in a time that does not grow beyond a fixed budget. The digest of a
value within the budget covers all of it. A larger value is compared by its identity, its size and a
sample, and the digest says that a change may be missed. Next: ``attributes`` compares digests, and
packs the values that have changed or may have.
"""

import hashlib
import io
import logging
import math
import pickle
import sys
import threading
import time
import types
import weakref
import zlib
from collections import deque
from contextlib import suppress
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from harness.checkpoints.packing import TooLargeError
from harness.compat import num_writes
from harness.kinds import REPORTING, SCALARS

# Objects without a state of the run: handles of the system, and data sets, which give the same
# sample for an index. So are the objects of packages that only show or record a run.
IGNORED = (
    *(types.ModuleType, logging.Logger, logging.Handler, io.IOBase, weakref.ref),
    *(threading.Thread, threading.Event, threading.Condition, threading.local),
    *(type(threading.Lock()), type(threading.RLock()), Dataset, DataLoader, Sampler),
)
_identities: dict[int, tuple[weakref.ref[Any], int]] = {}
_numbers = count()
SAMPLE = 4096  # numbers of a large array that are compared
TENSOR_OBJECTS = 8  # a tensor takes as long as this many other objects


class Budget(NamedTuple):
    """How much of one attribute a digest covers, before it takes a sample."""

    num_pickled: float  # bytes of a pickle
    num_bytes: float  # of the tensors and arrays in it
    num_objects: float  # that are no numbers, texts or builtin containers


WHOLE = Budget(2**25, 2**26, 50_000)  # of modules and callbacks, which training changes
SAMPLED = Budget(2**20, 2**24, 4_000)  # of data, which training seldom changes
UNLIMITED = Budget(math.inf, math.inf, math.inf)


class Digest(NamedTuple):
    """The digest of a value."""

    content: Any
    has_tensors: bool  # or arrays
    is_complete: bool  # else a change may be missed


class DigestPickler(pickle.Pickler):
    """Pickles any value; names stand for what is large, shared or cannot be pickled.

    Args:
        file: takes the pickle, which is never read.
        named: objects that a checkpoint holds in another place, by id.
        budget: a tensor or an array beyond it becomes its outline.

    Raises:
        TooLargeError: while it pickles more objects than the budget.
    """

    def __init__(self, file: Any, named: dict[int, str], budget: Budget) -> None:
        super().__init__(file, protocol=4)
        self.named, self.has_tensors, self.is_complete = named, False, True
        _, self.num_bytes_left, self.num_objects_left = budget

    def reducer_override(self, obj: Any) -> Any:
        """Describe one object that is no number, text or builtin container."""
        kind = type(obj)
        self.num_objects_left -= TENSOR_OBJECTS if kind is Tensor else 1
        if self.num_objects_left < 0:
            raise TooLargeError
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
        self.has_tensors |= isinstance(obj, (Tensor, np.ndarray))
        # A frame's pickle is a copy of all its columns.
        if (num_bytes := bytes_in(obj)) > self.num_bytes_left or isinstance(obj, np.memmap):
            self.is_complete &= shows_changes(obj)
            return text(*outline(obj, self.named))
        self.num_bytes_left -= num_bytes
        if isinstance(obj, Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            flat = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            numbers = flat.view(torch.uint8).cpu().numpy().data
            return text(obj.dtype, tuple(obj.shape), zlib.crc32(numbers))
        if kind is np.ndarray and not obj.dtype.hasobject:
            content = np.ascontiguousarray(obj).reshape(-1).view(np.uint8).data
            return text(obj.dtype, obj.shape, zlib.crc32(content))
        try:
            reduced = obj.__reduce_ex__(4)
        except Exception:  # whatever an author's object raises
            return text(kind, id(obj))
        return text(kind, reduced) if isinstance(reduced, str) else reduced


def bytes_in(value: Any) -> int:
    """Return the bytes that an array, a table or a frame says that it has; 0 of anything else."""
    try:
        num_bytes = value.estimated_size() if hasattr(value, "estimated_size") else value.nbytes
    except Exception:  # it has no size, or its class raises
        return 0
    return num_bytes if isinstance(num_bytes, int) else 0


def shows_changes(value: Any) -> bool:
    """Return whether the outline of a large value differs after every usual change of it.

    torch counts the writes to a tensor. A mapped or read-only array is a file, or a constant.
    """
    if isinstance(value, np.ndarray):
        return isinstance(value, np.memmap) or not value.flags.writeable
    return isinstance(value, (Tensor, str, bytes))


def identity(value: Any) -> int:
    """Return a number that no other object has, or had while this process runs.

    ``id`` alone is the same for an object that takes the memory of an earlier one.
    """
    known = _identities.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    try:
        reference = weakref.ref(value)
    except TypeError:  # of lists, dicts, tuples and texts
        return id(value)
    _identities[id(value)] = reference, next(_numbers)
    return _identities[id(value)][1]


def outline(value: Any, named: dict[int, str], depth: int = 3) -> tuple[Any, ...]:
    """Describe a large value by its identity, its size and a sample of what it holds."""
    kind = type(value)
    if kind in SCALARS and sys.getsizeof(value) <= SAMPLE:
        return (value,)
    found: tuple[Any, ...] = (kind, identity(value))
    if isinstance(value, Tensor):
        return *found, value.dtype, tuple(value.shape), num_writes(value)
    if isinstance(value, np.ndarray):
        found += str(value.dtype), value.shape
        if isinstance(value, np.memmap) or not value.flags.writeable or value.dtype.hasobject:
            return found  # to read from many places of a file takes long
        flags = value.flags
        flat = value.ravel(order="K") if flags.c_contiguous or flags.f_contiguous else value[:64]
        sample = np.ascontiguousarray(flat[:: max(1, len(flat) // SAMPLE)])
        return *found, zlib.crc32(sample.data)
    with suppress(Exception):  # a class of the user may have no length
        found += (len(value),)
    if depth == 0 or id(value) in named:
        return found
    most = 4**depth  # so that lists of lists of lists stay few
    parts: list[Any] = [*vars(value).values()] if hasattr(value, "__dict__") else []
    if isinstance(value, (list, tuple, deque)):
        parts = [value[i * len(value) // most] for i in range(min(len(value), most))]
    elif isinstance(value, dict):
        ends = chain(islice(value.items(), most), islice(reversed(value.items()), most))
        parts = [part for item in ends for part in item]
    elif isinstance(value, (set, frozenset)):
        parts = [*islice(value, most)]
    return *found, *(outline(part, named, depth - 1) for part in parts)


def text(*parts: Any) -> tuple[Any, ...]:
    """Return a text that pickle writes in place of an object."""
    return str, (repr(parts),)


def digest(value: Any, named: dict[int, str], budget: Budget = SAMPLED) -> Digest:
    """Return a digest, which is equal for equal values.

    A digest of packed values with an ``UNLIMITED`` budget is the same on all ranks.
    """
    if type(value) in SCALARS:
        if sys.getsizeof(value) > budget.num_pickled:
            return Digest(outline(value, named), False, True)
        # A NaN equals itself, and 0.0 does not equal -0.0.
        return Digest((type(value).__name__, repr(value)), False, True)
    content, num_left = hashlib.blake2b(digest_size=16), budget.num_pickled

    def write(data: Any) -> None:
        nonlocal num_left
        if (num_left := num_left - len(data)) < 0:
            raise TooLargeError
        content.update(data)

    pickler = DigestPickler(types.SimpleNamespace(write=write), named, budget)
    # Equal texts need not be one object, and packed values do not hold themselves.
    pickler.fast = budget is UNLIMITED
    try:
        pickler.dump(value)
    except TooLargeError:
        return Digest(outline(value, named), pickler.has_tensors, False)
    except Exception:  # too many levels, or a class of the user raises
        return Digest(("object", id(value)), True, True)
    return Digest(content.hexdigest(), pickler.has_tensors, pickler.is_complete)
