"""Compute digests of any values: if a value changes, its digest changes.

In: an attribute. Out: a digest. A budget limits its computation: up to this size, the digest covers
the whole value. For a larger value it covers the identity, the size and a sample, and
``is_complete`` is false. Next: ``attributes`` compares digests, and packs the values that have
changed or may have changed.
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
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from harness.checkpoints.packing import TooLargeError
from harness.compat import num_writes
from harness.kinds import REPORTING, SCALARS

# Objects that hold no state of a run: handles of the system, and data sets, which return the same
# sample for an index.
IGNORED = (
    *(types.ModuleType, logging.Logger, logging.Handler, io.IOBase, weakref.ref),
    *(threading.Thread, threading.Event, threading.Condition, threading.local),
    *(type(threading.Lock()), type(threading.RLock()), Dataset, DataLoader, Sampler),
)
_identities: dict[int, tuple[weakref.ref[Any], int]] = {}
_numbers = count()
SAMPLE = 4096  # numbers of a large array that a digest covers
TENSOR_OBJECTS = 8  # a tensor takes as long as this many other objects


class Budget(NamedTuple):
    """The largest attribute that a digest covers completely, and not only by a sample."""

    num_pickled: float  # bytes of a pickle
    num_bytes: float  # bytes of the tensors and arrays in it
    num_objects: float  # objects other than numbers, texts and builtin containers


WHOLE = Budget(2**25, 2**26, 50_000)  # for modules and callbacks, which training changes
SAMPLED = Budget(2**20, 2**24, 4_000)  # for data, which training seldom changes
UNLIMITED = Budget(math.inf, math.inf, math.inf)


class Digest(NamedTuple):
    """The digest of a value."""

    content: Any
    has_tensors: bool  # the value holds tensors or arrays
    is_complete: bool  # if false, the digest may miss a change


class DigestPickler(pickle.Pickler):
    """Pickle any value, with texts in place of large, shared and unpicklable objects.

    Args:
        file: receives the pickle, which is never read.
        named: names, by id, of objects that a checkpoint holds in another place.
        budget: limits. For a tensor or an array beyond them, the pickle has its ``outline``.

    Raises:
        TooLargeError: the value has more objects than the budget allows.
    """

    def __init__(self, file: Any, named: dict[int, str], budget: Budget) -> None:
        super().__init__(file, protocol=4)
        self.named, self.has_tensors, self.is_complete = named, False, True
        _, self.num_bytes_left, self.num_objects_left = budget

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle an object that is no number, text or builtin container."""
        kind = type(obj)
        self.num_objects_left -= TENSOR_OBJECTS if kind is Tensor else 1
        if self.num_objects_left < 0:
            raise TooLargeError
        if obj is str:  # ``as_text`` returns it
            return NotImplemented
        if id(obj) in self.named:
            return as_text(self.named[id(obj)])
        if isinstance(obj, IGNORED) or kind.__module__.partition(".")[0] in REPORTING:
            return as_text(kind)
        if isinstance(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            # A name is the same on all ranks. Lambdas share one name, so add the id.
            return as_text(obj.__module__, obj.__qualname__, "<" in obj.__qualname__ and id(obj))
        if hasattr(kind, "__next__"):
            return as_text(time.monotonic_ns())  # an iterator hides its position: assume a change
        self.has_tensors |= isinstance(obj, (Tensor, np.ndarray))
        # Use an outline, because a pickle would copy all columns of a data frame.
        if (num_bytes := num_bytes_of(obj)) > self.num_bytes_left or isinstance(obj, np.memmap):
            self.is_complete &= shows_changes(obj)
            return as_text(*outline(obj, self.named))
        self.num_bytes_left -= num_bytes
        if isinstance(obj, Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            flat = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            numbers = flat.view(torch.uint8).cpu().numpy().data
            return as_text(obj.dtype, tuple(obj.shape), zlib.crc32(numbers))
        if kind is np.ndarray and not obj.dtype.hasobject:
            content = np.ascontiguousarray(obj).reshape(-1).view(np.uint8).data
            return as_text(obj.dtype, obj.shape, zlib.crc32(content))
        try:
            reduced = obj.__reduce_ex__(4)
        except Exception:  # a user's class may raise any exception
            return as_text(kind, id(obj))
        return as_text(kind, reduced) if isinstance(reduced, str) else reduced


def num_bytes_of(value: Any) -> int:
    """Return the size in bytes that an array or a data frame reports; 0 for any other object."""
    try:
        num_bytes = value.estimated_size() if hasattr(value, "estimated_size") else value.nbytes
    except Exception:  # no such attribute, or the user's class raises
        return 0
    return num_bytes if isinstance(num_bytes, int) else 0


def shows_changes(value: Any) -> bool:
    """Return whether a change of a large value always changes its outline.

    torch counts the writes to a tensor. A read-only or memory-mapped array counts as a constant.
    """
    if isinstance(value, np.ndarray):
        return isinstance(value, np.memmap) or not value.flags.writeable
    return isinstance(value, (Tensor, str, bytes))


def identity(value: Any) -> int:
    """Return a number that no other object of this process has or had.

    An ``id`` is not such a number, because Python reuses the ``id`` of a freed object.
    """
    known = _identities.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    try:
        reference = weakref.ref(value, partial(_forget, id(value)))
    except TypeError:  # lists, dicts, tuples and texts have no weak references
        return id(value)
    _identities[id(value)] = reference, next(_numbers)
    return _identities[id(value)][1]


def _forget(key: int, _: Any) -> None:
    """Drop the entry of a freed object, so that entries do not fill the memory."""
    _identities.pop(key, None)


def outline(value: Any, named: dict[int, str], depth: int = 3) -> tuple[Any, ...]:
    """Return the identity, the size and a sample of the contents of a large value."""
    kind = type(value)
    if kind in SCALARS and sys.getsizeof(value) <= SAMPLE:
        return (value,)
    found: tuple[Any, ...] = (kind, identity(value))
    if isinstance(value, Tensor):
        return *found, value.dtype, tuple(value.shape), num_writes(value)
    if isinstance(value, np.ndarray):
        found += str(value.dtype), value.shape
        if isinstance(value, np.memmap) or not value.flags.writeable or value.dtype.hasobject:
            return found  # a sample would read many places of a file, which is slow
        flags = value.flags
        flat = value.ravel(order="K") if flags.c_contiguous or flags.f_contiguous else value[:64]
        sample = np.ascontiguousarray(flat[:: max(1, len(flat) // SAMPLE)])
        return *found, zlib.crc32(sample.data)
    with suppress(Exception):  # a user's class may have no length
        found += (len(value),)
    if depth == 0 or id(value) in named:
        return found
    max_parts = 4**depth  # limits the sample of nested lists
    parts: list[Any] = [*vars(value).values()] if hasattr(value, "__dict__") else []
    if isinstance(value, (list, tuple, deque)):
        parts = [value[i * len(value) // max_parts] for i in range(min(len(value), max_parts))]
    elif isinstance(value, dict):
        ends = chain(islice(value.items(), max_parts), islice(reversed(value.items()), max_parts))
        parts = [part for item in ends for part in item]
    elif isinstance(value, (set, frozenset)):
        parts = [*islice(value, max_parts)]
    return *found, *(outline(part, named, depth - 1) for part in parts)


def as_text(*parts: Any) -> tuple[Any, ...]:
    """Return the ``__reduce__`` value with which pickle writes a text in place of an object."""
    return str, (repr(parts),)


def digest(value: Any, named: dict[int, str], budget: Budget = SAMPLED) -> Digest:
    """Return a digest, which is equal for equal values.

    With an ``UNLIMITED`` budget, all ranks compute the same digest of equal packed values.
    """
    if type(value) in SCALARS:
        if sys.getsizeof(value) > budget.num_pickled:
            return Digest(outline(value, named), False, True)
        # As text, a NaN equals itself, and 0.0 does not equal -0.0.
        return Digest((type(value).__name__, repr(value)), False, True)
    content, num_left = hashlib.blake2b(digest_size=16), budget.num_pickled

    def write(data: Any) -> None:
        nonlocal num_left
        if (num_left := num_left - len(data)) < 0:
            raise TooLargeError
        content.update(data)

    pickler = DigestPickler(types.SimpleNamespace(write=write), named, budget)
    # Without a memo, the digest ignores which equal texts are one object. Packed values have no
    # cycles, so pickle needs no memo.
    pickler.fast = budget is UNLIMITED
    try:
        pickler.dump(value)
    except TooLargeError:
        return Digest(outline(value, named), pickler.has_tensors, False)
    except Exception:  # too many levels, or a user's class raises
        return Digest(("object", id(value)), True, True)
    return Digest(content.hexdigest(), pickler.has_tensors, pickler.is_complete)
