"""Packs Python values into what ``torch.load(weights_only=True)`` reads, and unpacks them.

In: numbers, text, None, lists, tuples, dicts, sets, deques, Counters, defaultdicts, NumPy arrays
and tensors. Out: the same values; a kind that torch's plain reader refuses becomes a dict whose key
``"#"`` names it. Next: ``writing`` packs whole checkpoints, ``attributes`` what training changed.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

MARK = "#"
SCALARS = {type(None), bool, int, float, complex, str, bytes}
NATIVE = {bytearray, torch.Size, torch.dtype, torch.device, torch.layout}
MAPPINGS: dict[str, Any] = {k.__name__: k for k in (dict, OrderedDict, Counter, defaultdict)}
COLLECTIONS: dict[str, Any] = {k.__name__: k for k in (list, tuple, set, frozenset, deque)}
FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, deque, Counter, OrderedDict)
}
TENSORS = (Tensor, torch.nn.Parameter)


class NotPlainError(Exception):
    """Says why a value cannot be packed."""


class Packer:
    """Packs values; an object that is reached twice is packed once, so that it stays shared.

    Subclasses decide what becomes of tensors and of objects that are not plain.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[Any, Any]] = {}  # by id: a value, and what it is packed into

    def tensor(self, value: Tensor, place: tuple[Any, ...]) -> Any:
        """Pack a tensor, which is saved with the attributes that its author has given it."""
        is_plain = type(value) in TENSORS and {*map(type, vars(value).values())} <= SCALARS
        return value if is_plain else self.other(value, place)

    def other(self, value: Any, place: tuple[Any, ...]) -> Any:
        """Pack an object of another kind, or raise a ``NotPlainError``."""
        raise NotPlainError(f"a {class_name(value)}")

    def pack(self, value: Any, place: tuple[Any, ...] = ()) -> Any:
        """Pack a value; nothing is copied where nothing has to be replaced.

        Args:
            value: anything.
            place: keys and indices that lead to it, for messages.

        Raises:
            NotPlainError: from ``tensor`` and ``other``, or for a container that holds itself.
        """
        if type(value) in SCALARS or type(value) in NATIVE:
            return value
        if id(value) not in self.nodes:
            self.nodes[id(value)] = value, self  # until its parts are packed
            self.nodes[id(value)] = value, self._pack(value, place)
        node = self.nodes[id(value)][1]
        if node is self:
            raise NotPlainError(f"a {class_name(value)} that holds itself")
        return node

    def _pack(self, value: Any, place: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in MAPPINGS.values():
            return self._mapping(value, place)
        if kind in COLLECTIONS.values():
            parts = list(value)
            if not {*map(type, parts)} <= SCALARS:
                parts = [self.pack(part, (*place, i)) for i, part in enumerate(value)]
            is_same = all(map(is_identical, parts, value))
            if kind in (list, tuple, set) and is_same:
                return value
            if kind in (list, tuple):
                return kind(parts)
            maxlen = value.maxlen if kind is deque else None
            return {MARK: kind.__name__, "items": parts, "maxlen": maxlen}
        if isinstance(value, Tensor):
            return self.tensor(value, place)
        is_array = kind is np.ndarray or isinstance(value, np.generic)
        if is_array and not value.dtype.hasobject and not value.dtype.names:
            return packed_array(value)
        return self.other(value, place)

    def _mapping(self, value: Any, place: tuple[Any, ...]) -> Any:
        kind = type(value)
        keys = [self.pack(key, (*place, key)) for key in value]
        values = [self.pack(item, (*place, key)) for key, item in value.items()]
        if kind is not defaultdict and MARK not in value and all(map(is_identical, keys, value)):
            if all(map(is_identical, values, value.values())):
                return value
            if kind is not Counter:
                node = kind(zip(keys, values, strict=True))
                if kind is OrderedDict:
                    vars(node).update(vars(value))  # the `_metadata` of a state_dict
                return node
        factory = getattr(value, "default_factory", None)
        if factory is not None and factory not in FACTORIES.values():
            return self.other(value, place)  # a function
        name = None if factory is None else factory.__name__
        return {MARK: kind.__name__, "keys": keys, "values": values, "factory": name}


def is_identical(one: Any, other: Any) -> bool:
    """Whether two names stand for one object."""
    return one is other


def class_name(value: Any) -> str:
    """The name of a value's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def packed_array(value: Any) -> dict[str, Any]:
    """An array or scalar of NumPy as its bytes, in the order in which they lie in memory."""
    array = np.asarray(value)
    order: Any = "F" if array.flags.fnc else "C"
    data = array.ravel(order).view(np.uint8).copy()
    return {
        MARK: "array" if isinstance(value, np.ndarray) else "scalar",
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "order": order,
        "data": torch.from_numpy(data),
    }


class Unpacker:
    """Makes values of what ``Packer`` has made; nothing in it names code that is run.

    Args:
        device: of the tensors that were not on the CPU.
        targets: objects of this run that are filled in place, by the id of their packed values.
    """

    def __init__(self, device: Any = "cpu", targets: dict[int, Any] | None = None) -> None:
        self.device, self.targets = device, targets or {}
        self.made: dict[int, Any] = {}  # by the id of what was packed

    def unpack(self, node: Any) -> Any:
        """The value of a node, whose own lists and dicts become part of it."""
        if type(node) in SCALARS or type(node) in NATIVE:
            return node
        if id(node) not in self.made:
            self.made[id(node)] = filled(self.targets.get(id(node)), self._unpack(node))
        return self.made[id(node)]

    def _unpack(self, node: Any) -> Any:
        kind = type(node)
        if kind is dict and MARK in node:
            return self._marked(node)
        if kind in MAPPINGS.values():
            for key, value in node.items():
                node[key] = self.unpack(value)
        elif kind is list and not {*map(type, node)} <= SCALARS:
            node[:] = map(self.unpack, node)
        elif kind is tuple:
            return tuple(map(self.unpack, node))
        return node

    def _marked(self, node: dict[str, Any]) -> Any:
        match name := node[MARK]:
            case "tensor":
                return node["data"].to(self.device)
            case "array" | "scalar":
                flat = node["data"].numpy().view(node["dtype"])
                array = flat.reshape(node["shape"], order=node["order"])
                return array if name == "array" else array[()]
            case "deque":
                return deque(map(self.unpack, node["items"]), node["maxlen"])
        if name in COLLECTIONS:
            return COLLECTIONS[name](map(self.unpack, node["items"]))
        is_default = name == "defaultdict"
        made = defaultdict(FACTORIES.get(node["factory"])) if is_default else MAPPINGS[name]()
        keys, values = map(self.unpack, node["keys"]), map(self.unpack, node["values"])
        dict.update(made, zip(keys, values, strict=True))
        return made


def filled(live: Any, value: Any) -> Any:
    """An object filled with the contents of another one, or that one where it cannot be."""
    if type(live) is not type(value):
        return value
    if isinstance(live, Tensor):
        is_dense = live.layout is torch.strided and live.is_leaf and not live.is_inference()
        if not is_dense or (live.shape, live.dtype) != (value.shape, value.dtype):
            return value
        with torch.no_grad():
            live.copy_(value)
    elif isinstance(live, np.ndarray):
        if not live.flags.writeable or (live.shape, live.dtype) != (value.shape, value.dtype):
            return value
        live[...] = value
    elif isinstance(live, (list, bytearray)):
        live[:] = value
    elif isinstance(live, (dict, set)):
        live.clear()
        live.update(value)
    elif isinstance(live, deque) and live.maxlen == value.maxlen:
        live.clear()
        live.extend(value)
    else:
        return value
    return live
