"""Remember what a module and all that it reaches hold, and bring it back in place.

In: objects of the user. Containers are copied, their elements are not. A tensor is copied to the
host when an operation is about to write it (``before_write``), so that a large model costs nothing
unless its step writes parameters. Next: ``parity_passes.py`` restores after each pass.
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
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from harness.data.randomness import GENERATORS
from harness.kinds import MACHINERY, RECORDING, SCALARS, package, sum_dtype

MOST_BYTES = 64 * 2**20  # on the host
MOST_OBJECTS = 100_000
MOST_ELEMENTS = 10_000  # of a container of a data module
MOST_COMPARED = 1024  # elements of a tensor, in ``numbers``
CONTAINERS = (list, dict, set, deque, bytearray)
GLOBALS: Any = (*CONTAINERS, *GENERATORS, Tensor, np.ndarray)  # of a user's file
# A step reads them, and leaves them as they are; or the run has them, and they are replaced.
LEFT_ALONE = (
    *(types.ModuleType, logging.Logger, logging.Handler),
    *(threading.Thread, weakref.ref, *weakref.ProxyTypes, pl.Trainer, pl.strategies.Strategy),
    *(pl.loggers.Logger, torch.dtype, torch.device, torch.utils.hooks.RemovableHandle),
)


class NotCheckedError(Exception):
    """The samples of a check cannot be computed without a trace in the run; it says why."""


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host: all that a check moves there goes through here."""
    return tensor.detach().to("cpu", copy=True)  # synchronises


class Snapshot:
    """Hold the state of objects, and restore it in place.

    Args:
        roots: modules, callbacks, or any objects whose attributes and containers are followed.
        data: the data module; its arrays and large containers are left alone.

    Raises:
        NotCheckedError: an iterator or an open file is among them, which nobody can set back; or
            more than ``MOST_OBJECTS``.
    """

    def __init__(self, *roots: Any, data: Any = None) -> None:
        self.contents: list[tuple[Any, Any]] = []  # a container and its elements
        self.cells: list[tuple[Any, Any]] = []  # of closures
        self.of_owners: list[tuple[Any, str, Any]] = []  # attributes of classes, names in files
        self.states: list[tuple[Any, Any]] = []  # arrays and generators, with copies of them
        self.tensors: list[tuple[Tensor, Tensor, Tensor | None, bool]] = []
        self.storages: set[int] = set()  # of the tensors, by address
        self.written: dict[int, tuple[Tensor, Tensor]] = {}  # bytes of a storage, and their copy
        self.labels: dict[int, str] = {}  # of the attributes of objects, by id
        self.num_bytes = 0
        seen: set[int] = set()
        self._follow([*roots], seen)
        self._follow([data], seen, is_data=True)

    def _follow(self, queue: list[Any], seen: set[int], is_data: bool = False) -> None:
        for value in queue:  # which grows meanwhile
            is_plain = type(value) in SCALARS and type(value) is not bytearray
            if is_plain or id(value) in seen or isinstance(value, LEFT_ALONE):
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
        """Remember one object; iterate over those that it holds."""
        kind = type(value)
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not value.is_meta:
                self.storages.add(value.untyped_storage().data_ptr())
                # ``.data`` is an alias, which a step may exchange.
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
                raise NotCheckedError(f"it holds a {kind.__name__}, which cannot be set back")
        elif isinstance(value, (*CONTAINERS, tuple, frozenset)):
            elements = elements_of(value)
            if isinstance(value, CONTAINERS):
                self.contents.append((value, elements))
            held = [x for pair in elements for x in pair] if isinstance(value, dict) else elements
            if not {*map(type, held)} <= SCALARS:
                yield from held
            if kind.__module__ != "builtins" and hasattr(value, "__dict__"):
                yield vars(value)  # of a class that inherits from a container
        elif isinstance(value, types.FunctionType):
            if package(value) in (*MACHINERY, "torch"):
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
            if not is_module and (package(kind) in ("harness", *RECORDING) or is_internal(kind)):
                return
            self.labels[id(vars(value))] = kind.__name__
            held = [one for one in vars(value).values() if isinstance(one, dict)]
            self.labels |= {id(one): kind.__name__ for one in held}
            yield vars(value)
            if package(kind) not in (*MACHINERY, "torch"):
                yield from self._of_class(kind)
        if package(kind) not in (*MACHINERY, "torch", "builtins", "numpy"):
            bases = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
            members = [item for base in bases for item in base.items()]
            slots = {name for name, one in members if isinstance(one, types.MemberDescriptorType)}
            held = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
            self.of_owners += [(value, name, part) for name, part in held]
            yield from (part for _, part in held)

    def _of_class(self, kind: type) -> Iterator[Any]:
        """Remember the numbers, texts and containers of a user's class, and of its file."""
        classes = [k for k in kind.__mro__ if package(k) not in (*MACHINERY, "torch", "builtins")]
        for owner in {id(o): o for o in [*classes, sys.modules.get(kind.__module__)] if o}.values():
            for name, value in list(vars(owner).items()):
                if name[:2] != "__" and (type(value) in SCALARS or isinstance(value, GLOBALS)):
                    self.of_owners.append((owner, name, value))
                    yield value

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > MOST_BYTES:
            size = f"{MOST_BYTES >> 20} MiB"
            raise NotCheckedError(f"a step may change more than {size} of its state")

    def before_write(self, tensor: Tensor) -> None:
        """Copy what an operation is about to write, if it is part of the state.

        Raises:
            NotCheckedError: before anything is written, where the copies would be too large.
        """
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self.storages and place not in self.written:
            self._count(storage.nbytes())
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.written[place] = content, to_host(content)

    def numbers(self) -> dict[tuple[int, str], Tensor]:
        """Return the numbers and small tensors that the containers hold now, by place and name."""
        found = {}
        for i, (live, _) in enumerate(self.contents):
            if len(live) > MOST_COMPARED:
                continue
            owner, is_list = (
                self.labels.get(id(live), "an element"),
                isinstance(live, (list, deque)),
            )
            pairs = live.items() if isinstance(live, dict) else enumerate(live if is_list else ())
            for key, value in pairs:
                is_small = isinstance(value, Tensor) and value.numel() <= MOST_COMPARED
                if type(value) in (int, float) or (is_small and value.layout is torch.strided):
                    found[i, f"{owner}.{key}"] = to_host(torch.as_tensor(value)).double()
        return found

    def fingerprint(self) -> list[str]:
        """Return texts that differ where a number or the sum of a tensor does."""
        detached = [tensor.detach() for tensor, *_ in self.tensors]
        sums = [float(tensor.to(sum_dtype(tensor.device)).sum()) for tensor in detached]
        return [repr(sums), repr({place: n.tolist() for place, n in self.numbers().items()})]

    def restore(self) -> None:
        """Bring everything back; what was written stays watched for the next pass."""
        with torch.no_grad():
            for content, copied in self.written.values():
                content.copy_(copied)
        for tensor, alias, gradient, requires_grad in self.tensors:
            if place_of(tensor) != place_of(alias):
                tensor.data = alias
            if tensor.is_leaf:
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                if tensor.grad is not gradient:
                    tensor.grad = gradient
        for cell, content in self.cells:
            cell.cell_contents = content
        for owner, name, value in self.of_owners:
            if getattr(owner, name, None) is not value:
                setattr(owner, name, value)
        for live, elements in self.contents:
            refill(live, elements)
        for value, state in self.states:
            if isinstance(value, np.ndarray):
                if value.flags.writeable:
                    value[...] = state
            else:
                set_state(value, state)


def is_large(value: Any) -> bool:
    """Return whether a container has more elements than are worth a copy."""
    return isinstance(value, (*CONTAINERS, tuple)) and len(elements_of(value)) > MOST_ELEMENTS


def elements_of(value: Any) -> list[Any]:
    """Return the elements of a container, or a dict's items; its length may raise."""
    return [*iter(value.items() if isinstance(value, dict) else value)]


def is_internal(kind: type) -> bool:
    """Return whether a class is a private one of torch."""
    return kind.__module__.startswith("torch._")


def place_of(tensor: Tensor) -> Any:
    """Return where a tensor's elements are, and in which order."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def cell_content(cell: Any) -> list[Any]:
    """Return the content of a closure's cell, in a list; nothing of an empty one."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def refill(live: Any, elements: list[Any]) -> None:
    """Give a container the elements that it had, unless it has them."""
    if isinstance(live, dict):
        now = list(live.items())
        is_same = len(now) == len(elements) and all(
            one[0] is other[0] and one[1] is other[1]
            for one, other in zip(now, elements, strict=True)
        )
    else:
        is_same = len(live) == len(elements) and all(map(lambda a, b: a is b, live, elements))
    if is_same:
        return
    live.clear()
    if isinstance(live, dict):
        live.update(dict(elements))  # a Counter counts what is no mapping
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
    """Set what ``state_of`` has returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
