"""Packs plain values into checkpoints, and unpacks them.

In: numbers, text, None, lists, tuples, dicts, sets, deques, Counters, defaultdicts, NumPy arrays
and tensors. Out: what ``torch.load(weights_only=True)`` reads: a kind that it refuses becomes a
dict whose key ``"#"`` names the kind. Next: ``writing`` packs whole checkpoints, ``attributes``
what training has changed.
"""

import io
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.kinds import SCALARS

MARK = "#"
MAPPINGS: Any = (dict, OrderedDict, Counter, defaultdict)
COLLECTIONS: Any = (list, tuple, set, frozenset, deque)
KINDS: dict[str, Any] = {k.__name__: k for k in (*MAPPINGS, *COLLECTIONS, int, float)}
MAX_KEPT = 2**26  # bytes of one attribute in a checkpoint; an entry of a list or dict counts as 256


class TooLargeError(Exception):
    """Raised where a value is larger than what a checkpoint keeps."""


class Packer:
    """Packs values; an object that is reached twice is packed once, so that it stays shared.

    What is not plain becomes ``None``, and ``objects`` names it.

    Args:
        keeps_objects: what is not plain stays as it is.
        named: of attributes: what a checkpoint holds in another place, by id. Their tensors become
            copies on the CPU.
    """

    def __init__(self, keeps_objects: bool = False, named: dict[int, str] | None = None) -> None:
        self.keeps_objects, self.named = keeps_objects, named
        self.nodes: dict[int, tuple[Any, Any]] = {}  # by id: a value, and what it is packed into
        self.objects: list[tuple[tuple[Any, ...], str]] = []  # where each is, and a reason
        self.num_marked = 0  # values that torch's plain reader would refuse
        self.num_left = math.inf  # bytes that may still be packed

    def refuse(self, value: Any, place: tuple[Any, ...], reason: str = "") -> Any:
        """Note that a value is not plain."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        self.objects.append((place, reason or kind.removeprefix("builtins.")))
        return value if self.keeps_objects else None

    def pack_attribute(self, value: Any, name: tuple[str, str]) -> Any:
        """Pack the value of an attribute, unless it is larger than what a checkpoint keeps."""
        self.num_left = MAX_KEPT
        try:
            return self.pack(value, name)
        except TooLargeError:
            self.nodes = {key: pair for key, pair in self.nodes.items() if pair[1] is not self}
            return self.refuse(value, name, f"larger than {MAX_KEPT >> 20} MiB")

    def spend(self, num_bytes: int) -> None:
        """Count bytes that are packed.

        Raises:
            TooLargeError: the attribute has more than a checkpoint keeps.
        """
        self.num_left -= num_bytes
        if self.num_left < 0:
            raise TooLargeError

    def pack(self, value: Any, place: tuple[Any, ...] = ()) -> Any:
        """Pack a value; `place` are the keys and indices that lead to it."""
        if type(value) in SCALARS:
            return value
        if id(value) in self.nodes:
            node = self.nodes[id(value)][1]
            return self.refuse(value, place, "it holds itself") if node is self else node
        num_refused = len(self.objects)
        self.nodes[id(value)] = value, self  # until its parts are packed
        node = self._pack(value, place)
        self.nodes[id(value)] = value, node
        if len(self.objects) > num_refused and not self.keeps_objects:
            del self.nodes[id(value)]  # another holder of it is refused as well
        return node

    def _pack(self, value: Any, place: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in MAPPINGS:
            self.spend(256 * len(value))
            return self._mapping(value, place)
        if kind in COLLECTIONS:
            self.spend(256 * len(value))
            parts = [self.pack(part, (*place, i)) for i, part in enumerate(value)]
            if kind in (list, tuple):
                return kind(parts)
            if kind is deque:
                return self.marked(kind, parts, value.maxlen)
            return self.marked(kind, sorted(parts, key=repr))  # alike in all processes
        if kind in (Tensor, torch.nn.Parameter):
            return self.tensor(value, place)
        if (kind is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject:
            self.spend(value.nbytes)
            file = io.BytesIO()
            np.save(file, value, allow_pickle=False)  # with its type, shape and order
            data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
            return self.marked(np.ndarray, data, kind is np.ndarray)
        return self.refuse(value, place)

    def _mapping(self, value: Any, place: tuple[Any, ...]) -> Any:
        kind, factory = type(value), getattr(value, "default_factory", None)
        if factory not in (None, *KINDS.values()):
            return self.refuse(value, place, "a defaultdict with a function")
        items = [(self.pack(k, (*place, k)), self.pack(v, (*place, k))) for k, v in value.items()]
        if kind is defaultdict or MARK in value or not all(map(is_plain_key, value)):
            return self.marked(kind, items, getattr(factory, "__name__", None))
        node = kind(dict(items))
        if kind is OrderedDict:
            vars(node).update(vars(value))  # the `_metadata` of a state_dict
        return node

    def tensor(self, value: Tensor, place: tuple[Any, ...]) -> Any:
        """Pack a tensor; of an attribute's its values alone, on the CPU."""
        if self.named is None:  # it is saved with the attributes that its author has given it
            has_plain_attributes = {*map(type, vars(value).values())} <= SCALARS
            return value if has_plain_attributes else self.refuse(value, place)
        if id(value) in self.named:
            return self.refuse(value, place, f"it is {self.named[id(value)]}")
        if value.is_meta or (value.requires_grad and value.is_leaf):
            return self.refuse(value, place, "a tensor without values, or trained, no parameter")
        self.spend(value.nbytes)
        data = value.detach().to("cpu", copy=True)
        return data if value.device.type == "cpu" else self.marked(Tensor, data)

    def marked(self, kind: type, items: Any, option: Any = None) -> dict[str, Any]:
        """Pack a value as its parts, under the name of its kind."""
        self.num_marked += 1
        return {MARK: kind.__name__, "items": items, "option": option}


def is_plain_key(key: Any) -> bool:
    """Return whether torch's plain reader gives a key of a dict back as it is."""
    return type(key) in SCALARS or (type(key) is tuple and all(map(is_plain_key, key)))


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
        """Return the value of a node, whose own lists and dicts become part of it."""
        if type(node) in SCALARS:
            return node
        if id(node) not in self.made:
            self.made[id(node)] = fill_in_place(self.targets.get(id(node)), self._unpack(node))
        return self.made[id(node)]

    def _unpack(self, node: Any) -> Any:
        kind = type(node)
        if kind is dict and MARK in node:
            return self._marked(node[MARK], node["items"], node["option"])
        if kind in MAPPINGS:
            for key, value in node.items():
                node[key] = self.unpack(value)
        elif kind is list:
            node[:] = map(self.unpack, node)
        elif kind is tuple:
            return tuple(map(self.unpack, node))
        return node

    def _marked(self, name: str, items: Any, option: Any) -> Any:
        if name == "Tensor":
            return items.to(self.device)
        if name == "ndarray":
            array = np.load(io.BytesIO(items.numpy().tobytes()), allow_pickle=False)
            return array if option else array[()]
        parts = [*map(self.unpack, items)]
        if name == "deque":
            return deque(parts, option)
        if name == "defaultdict":
            return defaultdict(KINDS.get(option), parts)
        return Counter(dict(parts)) if name == "Counter" else KINDS[name](parts)


def fill_in_place(live: Any, value: Any) -> Any:
    """Fill an object with the contents of another; return the other one if that cannot be."""
    if type(live) is not type(value):
        return value
    if isinstance(live, (Tensor, np.ndarray)):
        is_writable = live.flags.writeable if isinstance(live, np.ndarray) else live.is_leaf
        if is_writable and (live.shape, live.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                live[...] = value
            return live
        return value
    is_same_size = getattr(live, "maxlen", None) == getattr(value, "maxlen", None)
    if not isinstance(live, (list, dict, set, deque)) or not is_same_size:
        return value
    live.clear()
    (live.update if isinstance(live, (dict, set)) else live.extend)(value)
    return live
