"""Save the state of a module and of all objects that it refers to, and restore it in place.

In: objects of the user. A container is copied, and its elements are saved in turn. A tensor is
copied to the host only before an operation writes it (``before_write``). So a large model costs
nothing, unless its step writes parameters. Next: ``parity_passes.py`` restores the state.
"""

import functools
import io
import logging
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from harness.data.randomness import GENERATORS
from harness.kinds import FRAMEWORKS, REPORTING, SCALARS, corner, package, sum_dtype

MOST_BYTES = 64 * 2**20  # of copies on the host
MOST_OBJECTS = 100_000
MOST_ELEMENTS = 10_000  # of a data module's container
MOST_COMPARED = 1024  # elements of a tensor, in ``numbers``
CONTAINERS = (list, dict, set, deque, bytearray)
GLOBALS: Any = (*CONTAINERS, *GENERATORS, Tensor, np.ndarray)  # saved in a user's Python file
# Not saved: a step does not change them, or ``parity_passes.py`` replaces their methods.
LEFT_ALONE = (
    *(types.ModuleType, logging.Logger, logging.Handler),
    *(threading.Thread, weakref.ref, *weakref.ProxyTypes, pl.Trainer, pl.strategies.Strategy),
    *(pl.loggers.Logger, torch.dtype, torch.device, torch.utils.hooks.RemovableHandle),
)


class NotCheckedError(Exception):
    """The run cannot make a parity check; the message has the reason."""


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host. All copies of a check go through this function."""
    return tensor.detach().to("cpu", copy=True)  # synchronises


class Snapshot:
    """Save the state of objects, and restore it in place.

    Args:
        roots: modules, callbacks or other objects, with all objects that they refer to.
        data: the data module. Its arrays and large containers are left out.

    Raises:
        NotCheckedError: the objects include an iterator or an open file, or are more than
            ``MOST_OBJECTS``.
    """

    def __init__(self, *roots: Any, data: Any = None) -> None:
        self.contents: list[tuple[Any, Any]] = []  # containers, and lists of their elements
        self.cells: list[tuple[Any, Any]] = []  # of closures, and their contents
        self.attributes: list[tuple[Any, str, Any]] = []  # of classes, Python files and slots
        self.states: list[tuple[Any, Any]] = []  # arrays and generators, and their copied state
        self.tensors: list[tuple[Tensor, Tensor, Tensor | None, bool]] = []  # data, grad, flag
        self.storages: set[int] = set()  # addresses of the tensors' storages
        self.written: dict[int, tuple[Tensor, Tensor]] = {}  # by address: bytes, and their copy
        self.labels: dict[int, str] = {}  # class names, by id of an object's ``__dict__``
        self.num_bytes = 0
        seen: set[int] = set()
        self._follow([*roots], seen)
        self._follow([data], seen, is_data=True)

    def _follow(self, queue: list[Any], seen: set[int], is_data: bool = False) -> None:
        for value in queue:  # the loop appends to it
            is_scalar = type(value) in SCALARS and type(value) is not bytearray
            if is_scalar or id(value) in seen or isinstance(value, LEFT_ALONE):
                continue
            seen.add(id(value))
            if is_data and (isinstance(value, np.ndarray) or is_large(value)):
                continue
            if isinstance(value, (Dataset, DataLoader, Sampler)):
                self.contents.append((vars(value), list(vars(value).items())))
                continue
            if len(seen) > MOST_OBJECTS:
                raise NotCheckedError(f"it reaches more than {MOST_OBJECTS} objects")
            queue += self._parts(value)

    def _parts(self, value: Any) -> Iterator[Any]:
        """Save the state of one object, and yield the objects that it refers to."""
        kind = type(value)
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not value.is_meta:
                self.storages.add(value.untyped_storage().data_ptr())
                # A step may assign another tensor to ``.data``; this alias keeps the current one.
                gradient = value.grad if value.is_leaf else None
                self.tensors.append((value, value.data, gradient, value.requires_grad))
                yield from (gradient, vars(value))
        elif isinstance(value, np.ndarray):
            self._count(value.nbytes)
            self.states.append((value, value.copy()))
        elif isinstance(value, GENERATORS):
            self.states.append((value, state_of(value)))
        elif isinstance(value, io.IOBase) or hasattr(kind, "__next__"):
            if not getattr(value, "closed", False):
                raise NotCheckedError(f"it holds a {kind.__name__}, which cannot be restored")
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
            elements = elements_of(value)
            if isinstance(value, CONTAINERS):
                self.contents.append((value, elements))
            held = [x for pair in elements for x in pair] if isinstance(value, dict) else elements
            if not {*map(type, held)} <= SCALARS:
                yield from held
            if kind.__module__ != "builtins" and hasattr(value, "__dict__"):
                yield vars(value)  # a subclass of a container
        elif isinstance(value, types.FunctionType):
            if package(value) in (*FRAMEWORKS, "torch"):
                return
            for cell in value.__closure__ or ():
                with_content = cell_content(cell)
                self.cells += [(cell, content) for content in with_content]
                yield from with_content
            yield from (value.__defaults__ or (), value.__kwdefaults__ or {}, vars(value))
        elif isinstance(value, types.MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, torch.optim.Optimizer):
            yield value.state
            self.contents += [(group, list(group.items())) for group in value.param_groups]
        elif isinstance(value, torch.jit.ScriptModule):
            raise NotCheckedError("it holds a module of torch.jit")
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            is_module = isinstance(value, nn.Module)
            if not is_module and (package(kind) in ("harness", *REPORTING) or is_internal(kind)):
                return
            self.labels[id(vars(value))] = kind.__name__
            dicts = [item for item in vars(value).values() if isinstance(item, dict)]
            self.labels |= {id(item): kind.__name__ for item in dicts}
            yield vars(value)
            if package(kind) not in (*FRAMEWORKS, "torch"):
                yield from self._of_class(kind)
        if package(kind) not in (*FRAMEWORKS, "torch", "builtins", "numpy"):
            bases = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
            members = [item for base in bases for item in base.items()]
            slots = {name for name, item in members if isinstance(item, types.MemberDescriptorType)}
            held = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
            self.attributes += [(value, name, content) for name, content in held]
            yield from (content for _, content in held)

    def _of_class(self, kind: type) -> Iterator[Any]:
        """Save the numbers, strings and containers of a user's class, and of its Python file."""
        classes = [k for k in kind.__mro__ if package(k) not in (*FRAMEWORKS, "torch", "builtins")]
        for scope in {id(s): s for s in [*classes, sys.modules.get(kind.__module__)] if s}.values():
            for name, value in list(vars(scope).items()):
                if name[:2] != "__" and (type(value) in SCALARS or isinstance(value, GLOBALS)):
                    self.attributes.append((scope, name, value))
                    yield value

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > MOST_BYTES:
            size = f"{MOST_BYTES >> 20} MiB"
            raise NotCheckedError(f"a step may change more than {size} of its state")

    def before_write(self, tensor: Tensor) -> None:
        """Copy a tensor of the state that an operation is about to write.

        Raises:
            NotCheckedError: the copies would exceed ``MOST_BYTES``. Nothing is written yet.
        """
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self.storages and address not in self.written:
            self._count(storage.nbytes())
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.written[address] = content, to_host(content)

    def numbers(self) -> dict[tuple[int, str], Tensor]:
        """Return the current numbers and small tensors of the containers, by index and name."""
        found = {}
        for i, (live, _) in enumerate(self.contents):
            if len(live) > MOST_COMPARED:
                continue
            label = self.labels.get(id(live), "an element")
            is_list = isinstance(live, (list, deque))
            pairs = live.items() if isinstance(live, dict) else enumerate(live if is_list else ())
            for key, value in pairs:
                is_small = isinstance(value, Tensor) and value.numel() <= MOST_COMPARED
                if type(value) in (int, float) or (is_small and value.layout is torch.strided):
                    found[i, f"{label}.{key}"] = to_host(torch.as_tensor(value)).double()
        return found

    def fingerprint(self) -> list[str]:
        """Return strings that differ if a number, or the sum of a tensor, differs."""
        detached = [corner(tensor.detach()) for tensor, *_ in self.tensors]
        sums = [float(tensor.to(sum_dtype(tensor.device)).sum()) for tensor in detached]
        return [repr(sums), repr({key: n.tolist() for key, n in self.numbers().items()})]

    def restore(self) -> None:
        """Restore the state. The copies stay, for the next pass."""
        with torch.no_grad():
            for content, copy in self.written.values():
                content.copy_(copy)
        for tensor, alias, gradient, requires_grad in self.tensors:
            if memory_of(tensor) != memory_of(alias):
                tensor.data = alias
            if tensor.is_leaf:
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                if tensor.grad is not gradient:
                    tensor.grad = gradient
        for cell, content in self.cells:
            cell.cell_contents = content
        for holder, name, value in self.attributes:
            if getattr(holder, name, None) is not value:
                setattr(holder, name, value)
        for live, elements in self.contents:
            refill(live, elements)
        for value, state in self.states:
            if isinstance(value, np.ndarray):
                if value.flags.writeable:
                    value[...] = state
            else:
                set_state(value, state)


def is_large(value: Any) -> bool:
    """Return whether a container has more than ``MOST_ELEMENTS``."""
    is_container = isinstance(value, (*CONTAINERS, tuple))
    return is_container and any(True for _ in islice(iter(value), MOST_ELEMENTS, MOST_ELEMENTS + 1))


def elements_of(value: Any) -> list[Any]:
    """Return the elements of a container, or a dict's items, without calling ``len``."""
    return [*iter(value.items() if isinstance(value, dict) else value)]


def is_internal(kind: type) -> bool:
    """Return whether a class comes from a private module of torch."""
    return kind.__module__.startswith("torch._")


def memory_of(tensor: Tensor) -> Any:
    """Return the address, shape and strides of a tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def cell_content(cell: Any) -> list[Any]:
    """Return a list with the content of a closure's cell; empty if the cell is empty."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def refill(live: Any, elements: list[Any]) -> None:
    """Replace the elements of a container, unless it has the same elements."""
    if isinstance(live, dict):
        present = list(live.items())
        is_same = len(present) == len(elements) and all(
            one[0] is other[0] and one[1] is other[1]
            for one, other in zip(present, elements, strict=True)
        )
    else:
        is_same = len(live) == len(elements) and all(map(lambda a, b: a is b, live, elements))
    if is_same:
        return
    live.clear()
    if isinstance(live, dict):
        live.update(dict(elements))  # a Counter would count the items of a list
    else:
        (live.update if isinstance(live, set) else live.extend)(elements)


def state_of(generator: Any) -> Any:
    """Return the state of a generator object of ``torch``, ``random`` or ``numpy``."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Set a state that ``state_of`` has returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
