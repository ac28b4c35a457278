"""What ``packing`` has made plain, put back into the objects of a run that goes on."""

import random
import sys
from collections import defaultdict, deque
from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.checkpoints.belongings import NAMESPACES, attributes_of, class_name
from harness.checkpoints.packing import FACTORIES, MAPPINGS, SCALARS, SETS
from harness.places import is_owners_class
from harness.upstream.logged_values import restore_metric

MISSING: Any = object()


class LostError(Exception):
    """Says why a value cannot be put back."""


class Placer:
    """Makes values of what was packed; nothing in it names code that is run.

    Objects are those that are there, or of classes that the owner's modules have.

    Args:
        known: what is only named, by name.
        device: of the tensors that were not on the CPU.
        owners: objects whose modules are looked through for classes.
    """

    def __init__(self, known: dict[str, Any], device: torch.device, owners: Iterable[Any]) -> None:
        self.known, self.device = known, device
        self.made: dict[int, Any] = {}  # by the id of what was packed
        self.classes: dict[str, type] = {f"{k.__module__}.{k.__qualname__}": k for k in NAMESPACES}
        for name in {base.__module__ for owner in owners for base in type(owner).__mro__}:
            for kind in vars(sys.modules[name]).values() if name in sys.modules else ():
                if isinstance(kind, type) and is_owners_class(kind):
                    self.classes[f"{kind.__module__}.{kind.__qualname__}"] = kind

    def place(self, node: Any, live: Any = MISSING, is_same: bool = False) -> Any:
        """The value of a node.

        Args:
            node: what a value was packed into; it is not changed, and shares nothing with it.
            live: what is at its place now.
            is_same: whether that is to be filled, for others may hold it.

        Raises:
            LostError: it cannot be made.
        """
        kind = type(node)
        if kind in SCALARS:
            return node
        if id(node) in self.made:
            return self.made[id(node)]
        if kind is dict and "#" in node:
            made = getattr(self, "_" + node["#"])(node, live, is_same)
        elif kind is tuple:
            parts: Any = live if type(live) is tuple else ()
            made = tuple(self.place(n, part(parts, i)) for i, n in enumerate(node))
        elif kind is list:
            parts = live if type(live) is list else []
            made = self.made[id(node)] = live if is_same and type(live) is list else []
            made[:] = [self.place(n, part(parts, i)) for i, n in enumerate(node)]
        elif kind in MAPPINGS or kind is deque:  # of scalars
            made = live if is_same and type(live) is kind else node.copy()
            if made is live:
                made.clear()
                (made.extend if kind is deque else made.update)(node)
        elif kind is torch.Tensor:
            made = filled(live, node) if is_same else node.clone()
        elif kind is np.ndarray:
            made = filled_array(live, node) if is_same else node.copy()
        else:
            made = node
        self.made[id(node)] = made
        return made

    def _same(self, node: Any, live: Any, _: bool) -> Any:
        return self.place(node["of"], live, is_same=True)

    def _known(self, node: Any, *_: Any) -> Any:
        if node["name"] not in self.known:
            raise LostError(f"there is no {node['name']}")
        return self.known[node["name"]]

    def _silent(self, node: Any, live: Any, _: bool) -> Any:
        return None if live is MISSING else live

    def _opaque(self, node: Any, live: Any, _: bool) -> Any:
        if live is MISSING:
            raise LostError("a part of it is not there")
        return live

    def _enum(self, node: Any, live: Any, _: bool) -> Any:
        kind = self._class(node, live)
        if not issubclass(kind, Enum) or node["name"] not in kind.__members__:
            raise LostError(f"{node['class']} has no {node['name']}")
        return kind[node["name"]]

    def _class(self, node: Any, live: Any) -> Any:
        name = node["class"]
        if live is not MISSING and class_name(live) == name:
            return type(live)
        if name not in self.classes:
            raise LostError(f"no {name} is in sight")
        return self.classes[name]

    def _generator(self, node: Any, live: Any, is_same: bool) -> Any:
        state = self.place(node["state"])
        if live is MISSING or class_name(live) != node["class"] or not is_same:
            live = new_generator(node["class"], state, self.device)
        if isinstance(live, torch.Generator):
            live.set_state(state)
        elif isinstance(live, np.random.Generator):
            live.bit_generator.state = state
        elif isinstance(live, np.random.RandomState):
            live.set_state(state)
        else:
            live.setstate(state)
        return live

    def _metric(self, node: Any, live: Any, _: bool) -> Any:
        restore_metric(live, self.place(node["state"]), self.device)
        return live

    def _module(self, node: Any, live: Any, _: bool) -> Any:
        if not isinstance(live, nn.Module):
            raise LostError("there is no network to fill")
        tensors = {**dict(live.named_parameters()), **dict(live.named_buffers())}
        for name, tensor in zip(node["names"], node["tensors"], strict=True):
            self.place(tensor, tensors.get(name, MISSING))
        for path, value in zip(node["paths"], node["values"], strict=True):
            owner, _, name = path.rpartition(".")
            self.set(live.get_submodule(owner), name, value)
        return live

    def _mapping(self, node: Any, live: Any, is_same: bool) -> Any:
        kind = next(k for k in MAPPINGS if k.__name__ == node["class"])
        there: Any = live if type(live) is kind else {}
        if is_same and there is live:
            made = live
        elif node.get("factory") is not None:
            factory = getattr(there, "default_factory", None)
            made = defaultdict(FACTORIES.get(node["factory"], factory))
        else:
            made = kind()
        self.made[id(node)] = made
        keys = [self.place(key) for key in node["keys"]]
        values = [
            self.place(v, there.get(k, MISSING)) for k, v in zip(keys, node["values"], strict=True)
        ]
        made.clear()
        made.update(zip(keys, values, strict=True))
        return made

    def _items(self, node: Any, live: Any, is_same: bool) -> Any:
        kind = next(k for k in (deque, *SETS) if k.__name__ == node["class"])
        if kind is frozenset:
            return frozenset(map(self.place, node["items"]))
        made: Any = deque(maxlen=node["maxlen"]) if kind is deque else set()
        made = self.made[id(node)] = live if is_same and type(live) is kind else made
        parts = list(live) if type(live) is deque else []
        items = [self.place(item, part(parts, i)) for i, item in enumerate(node["items"])]
        made.clear()
        (made.extend if kind is deque else made.update)(items)
        return made

    def _namedtuple(self, node: Any, live: Any, _: bool) -> Any:
        parts = live if isinstance(live, tuple) else ()
        items = [self.place(item, part(parts, i)) for i, item in enumerate(node["items"])]
        return tuple.__new__(self._class(node, live), items)

    def _tensor(self, node: Any, live: Any, is_same: bool) -> Any:
        data = node["data"].to(self.device if node["is_on_device"] else "cpu", copy=True)
        if is_same:
            made = filled(live, data)
            if made is live:
                made.requires_grad_(node["requires_grad"])
                return made
        if node["is_parameter"]:
            return nn.Parameter(data, node["requires_grad"])
        return data.requires_grad_(node["requires_grad"])

    def _tensors(self, node: Any, live: Any, is_same: bool) -> Any:
        data = node["data"].to(self.device if node["is_on_device"] else "cpu")
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in node["shapes"]]
        parts = zip(data.split(sizes), node["shapes"], strict=True)
        tensors = [values.reshape(shape).clone() for values, shape in parts]
        if not is_same or type(live) is not list:
            return tensors
        live[:] = tensors
        return live

    def _stateful(self, node: Any, live: Any, _: bool) -> Any:
        if live is MISSING or not hasattr(live, "load_state_dict"):
            raise LostError("there is no object that loads its state")
        live.load_state_dict(self.place(node["state"]))
        return live

    def _object(self, node: Any, live: Any, is_same: bool) -> Any:
        kind = self._class(node, live)
        built_in: Any = next(k for k in (dict, list, deque, set, object) if issubclass(kind, k))
        made = live if is_same and type(live) is kind else built_in.__new__(kind)
        self.made[id(node)] = made
        before = attributes_of(live) or {} if type(live) is kind else {}
        if made is live:
            for name in before.keys() - set(node["names"]):
                object.__delattr__(made, name)
        for name, value in zip(node["names"], node["values"], strict=True):
            object.__setattr__(made, name, self.place(value, before.get(name, MISSING)))
        if "items" in node:
            items = [self.place(item) for item in node["items"]]
            if "keys" in node:
                items = list(zip(map(self.place, node["keys"]), items, strict=True))
            made.clear()
            (made.extend if isinstance(made, (list, deque)) else made.update)(items)
        return made

    def set(self, owner: Any, name: str, node: Any) -> None:
        """Set an attribute."""
        before = vars(owner).get(name, MISSING)
        if before is MISSING and type(node) is dict and node.get("#") == "silent":
            return
        made = self.place(node, before)
        if made is not before:
            object.__setattr__(owner, name, made)


def part(parts: Any, index: int) -> Any:
    """A part of what is there, if it has as many."""
    return parts[index] if index < len(parts) else MISSING


def filled(live: Any, data: torch.Tensor) -> Any:
    """A tensor filled with other values, or a new one where it cannot be."""
    fits = (
        isinstance(live, torch.Tensor)
        and (live.shape, live.dtype) == (data.shape, data.dtype)
        and live.layout is torch.strided
        and live.is_leaf
        and not live.is_inference()
    )
    if not fits:
        return data.clone()
    with torch.no_grad():
        live.copy_(data)
    return live


def filled_array(live: Any, data: Any) -> Any:
    """As ``filled``, for an array."""
    fits = type(live) is np.ndarray and (live.shape, live.dtype) == (data.shape, data.dtype)
    if not fits or not live.flags.writeable:
        return data.copy()
    live[...] = data
    return live


def new_generator(name: str, state: Any, device: torch.device) -> Any:
    """A generator of a kind."""
    match name.rpartition(".")[2]:
        case "Random":
            return random.Random()
        case "RandomState":
            return np.random.RandomState()
        case "Generator" if name.startswith("torch"):
            return torch.Generator()
    kinds = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    if state["bit_generator"] not in kinds:
        raise LostError(f"a {state['bit_generator']} was made in training")
    return np.random.Generator(getattr(np.random, state["bit_generator"])())
