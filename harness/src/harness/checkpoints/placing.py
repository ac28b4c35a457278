"""What ``packing`` has made plain, put back into the objects of a run that goes on."""

import builtins
import random
import sys
from collections import defaultdict, deque
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.checkpoints.belongings import (
    NAMESPACES,
    attributes_of,
    class_name,
    shared_containers,
)
from harness.checkpoints.packing import FACTORIES, MAPPINGS, SCALARS, SETS
from harness.places import is_owners_class
from harness.upstream.logged_values import metrics_in, restore_metric

MISSING: Any = object()


class LostError(Exception):
    """Says why a value cannot be put back."""


class Placer:
    """Makes values of what was packed; nothing in it names code that is run.

    Objects are those that are there, or of the owner's classes that are imported already.

    Args:
        known: what is only named, by name.
        device: of the tensors that were not on the CPU.
    """

    def __init__(self, known: dict[str, Any], device: torch.device) -> None:
        self.known, self.device = known, device
        self.made: dict[int, Any] = {}  # by the id of what was packed

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
        elif kind in (torch.Tensor, np.ndarray):
            made = filled(live if is_same else MISSING, node)
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
        module, _, attribute = name.rpartition(".")
        kind: Any = vars(sys.modules.get(module, builtins)).get(attribute)
        if kind not in NAMESPACES and not (isinstance(kind, type) and is_owners_class(kind)):
            raise LostError(f"no {name} is in sight")
        return kind

    def _generator(self, node: Any, live: Any, is_same: bool) -> Any:
        state = self.place(node["state"])
        if live is MISSING or class_name(live) != node["class"] or not is_same:
            device = self.device if node.get("is_on_device") else torch.device("cpu")
            live = new_generator(node["class"], state, device)
        if isinstance(live, np.random.Generator):
            live.bit_generator.state = state
        else:
            (getattr(live, "setstate", None) or live.set_state)(state)
        return live

    def _metric(self, node: Any, live: Any, _: bool) -> Any:
        restore_metric(live, self.place(node["state"]), self.device)
        return live

    def _module(self, node: Any, live: Any, _: bool) -> Any:
        if not isinstance(live, nn.Module):
            raise LostError("there is no network to fill")
        tensors = {**dict(live.named_parameters()), **dict(live.named_buffers())}
        for name, tensor in zip(node["names"], node["tensors"], strict=True):
            there = tensors.get(name, MISSING)
            made = self.place(tensor, there, is_same=True)
            if made is not there:
                path, _, leaf = name.rpartition(".")
                setattr(live.get_submodule(path), leaf, made)
        counted = dict(metrics_in(live))
        for name, counts in zip(node["metrics"], node["counts"], strict=True):
            restore_metric(counted[name], self.place(counts), self.device)
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
            factory = FACTORIES.get(node["factory"], getattr(there, "default_factory", None))
            if factory is None:
                raise LostError("nothing there has its default_factory")
            made = defaultdict(factory)
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

    def _bytearray(self, node: Any, live: Any, is_same: bool) -> Any:
        made = live if is_same and type(live) is bytearray else bytearray()
        made[:] = node["data"]
        return made

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
        kind: Any = type(owner)
        before = (shared_containers(kind) | vars(owner)).get(name, MISSING)
        if before is MISSING and type(node) is dict and node.get("#") == "silent":
            return
        made = self.place(node, before)
        if made is not before:
            object.__setattr__(owner, name, made)


def part(parts: Any, index: int) -> Any:
    """A part of what is there, if it has as many."""
    return parts[index] if index < len(parts) else MISSING


def filled(live: Any, data: Any) -> Any:
    """A tensor or an array filled with other values, or a new one where it cannot be."""
    is_tensor = isinstance(data, torch.Tensor)
    fits = type(live) is np.ndarray and live.flags.writeable
    if is_tensor:
        fits = isinstance(live, torch.Tensor) and live.layout is torch.strided and live.is_leaf
        fits = fits and not live.is_inference()
    if not fits or (live.shape, live.dtype) != (data.shape, data.dtype):
        return data.clone() if is_tensor else data.copy()
    with torch.no_grad():
        live[...] = data
    return live


def new_generator(name: str, state: Any, device: torch.device) -> Any:
    """A generator of a kind."""
    match name:
        case "random.Random":
            return random.Random()
        case "numpy.random.mtrand.RandomState":
            return np.random.RandomState()
        case "torch._C.Generator":
            return torch.Generator(device)
    kinds = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
    if state["bit_generator"] not in kinds:
        raise LostError(f"a {state['bit_generator']} was made in training")
    return np.random.Generator(getattr(np.random, state["bit_generator"])())
