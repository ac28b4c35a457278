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
import sys
import threading
import time
import types
import weakref
import zlib
from collections import deque
from contextlib import suppress
from itertools import islice
from typing import Any

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
# What is compared by all of its values: bytes of a pickle, and of tensors and arrays in it, and
# objects that are no numbers, texts or builtin containers.
MAX_PICKLED, MAX_NUMBERS, MAX_OBJECTS = 2**20, 2**24, 4_000
SAMPLE = 4096  # numbers of a large array that are compared


class DigestPickler(pickle.Pickler):
    """Pickles any value; names stand for what is large, shared or cannot be pickled.

    Args:
        file: takes the pickle, which is never read.
        named: objects that a checkpoint holds in another place, by id.
        is_bounded: read no more numbers and objects than the budget, and outlines of what is more.

    Raises:
        TooLargeError: while it pickles more objects than the budget.
    """

    def __init__(self, file: Any, named: dict[int, str], is_bounded: bool) -> None:
        super().__init__(file, protocol=4)
        self.named, self.has_tensors = named, False
        self.num_bytes_left = MAX_NUMBERS if is_bounded else math.inf
        self.num_objects_left = MAX_OBJECTS if is_bounded else math.inf

    def reducer_override(self, obj: Any) -> Any:
        """Describe one object that is no number, text or builtin container."""
        kind = type(obj)
        if (num_left := self.num_objects_left - 1) < 0:
            raise TooLargeError
        self.num_objects_left = num_left
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
        if (num_bytes := bytes_in(obj)) > self.num_bytes_left:
            return text(*outline(obj, self.named))
        self.num_bytes_left -= num_bytes
        if isinstance(obj, Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            flat = obj.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            numbers = flat.view(torch.uint8).cpu().numpy().data
            return text(obj.dtype, tuple(obj.shape), zlib.crc32(numbers))
        try:
            reduced = obj.__reduce_ex__(4)
        except Exception:  # whatever an author's object raises
            return text(kind, id(obj))
        return text(kind, reduced) if isinstance(reduced, str) else reduced


def bytes_in(value: Any) -> int:
    """Return the bytes that an array, a table or a frame says that it has; 0 of anything else."""
    try:
        num_bytes = value.estimated_size() if hasattr(value, "estimated_size") else value.nbytes
    except Exception:  # it says nothing, or is of an author's class that raises
        return 0
    return num_bytes if isinstance(num_bytes, int) else 0


def outline(value: Any, named: dict[int, str], depth: int = 3) -> tuple[Any, ...]:
    """Describe a large value by its identity, its size and a sample of what it holds."""
    kind = type(value)
    if kind in SCALARS and sys.getsizeof(value) <= SAMPLE:
        return (value,)
    found: tuple[Any, ...] = (kind, id(value))
    if isinstance(value, Tensor):
        return *found, value.dtype, tuple(value.shape), num_writes(value)
    if isinstance(value, np.ndarray):
        found += str(value.dtype), value.shape
        if isinstance(value, np.memmap) or not value.flags.writeable:
            return found  # to read from many places of a file takes long
        flat = value.reshape(-1) if value.flags.c_contiguous else value[:64]
        sample = np.ascontiguousarray(flat[:: max(1, len(flat) // SAMPLE)])
        return *found, zlib.crc32(sample.data)
    with suppress(Exception):  # of an author's class, which may have no length
        found += (len(value),)
    if depth == 0 or id(value) in named:
        return found
    most = 4**depth  # so that lists of lists of lists stay few
    parts: list[Any] = [*vars(value).values()] if hasattr(value, "__dict__") else []
    if isinstance(value, (list, tuple, deque)):
        parts = [value[i * len(value) // most] for i in range(min(len(value), most))]
    elif isinstance(value, dict):
        parts = [part for item in islice(value.items(), most) for part in item]
    elif isinstance(value, (set, frozenset)):
        parts = [*islice(value, most)]
    return *found, *(outline(part, named, depth - 1) for part in parts)


def text(*parts: Any) -> tuple[Any, ...]:
    """Return a text that pickle writes in place of an object."""
    return str, (repr(parts),)


def digest(value: Any, named: dict[int, str], is_packed: bool = False) -> tuple[Any, bool]:
    """Return a digest, equal for equal values, and whether the value holds tensors or arrays.

    The digest of packed values is the same in all processes.
    """
    if type(value) in SCALARS:
        if not is_packed and sys.getsizeof(value) > MAX_PICKLED:
            return outline(value, named), False
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
