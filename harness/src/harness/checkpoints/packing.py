"""Pack plain values into checkpoints, and unpack them.

In: plain values, which are numbers, text, None, lists, tuples, dicts, sets, deques, Counters,
defaultdicts, NumPy arrays and tensors. Out: values that ``torch.load(weights_only=True)`` reads. An
object of a class that it refuses becomes a dict whose key ``"#"`` names the class. Next:
``writing`` packs whole checkpoints, and ``attributes`` packs changed attributes.
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
# Bytes of an attribute in a checkpoint; each entry of a list or dict counts as 256.
MAX_KEPT = 2**26


class TooLargeError(Exception):
    """A value is larger than the limit for an attribute in a checkpoint."""


class Packer:
    """Pack values. An object that is held twice is packed once, so that it stays shared.

    A value that is not plain becomes ``None``, and ``objects`` lists it.

    Args:
        keeps_objects: leave values that are not plain unchanged.
        named: names, by id, of objects that a checkpoint holds in another place. Given only to
            pack attributes, whose tensors become copies on the CPU.
    """

    def __init__(self, keeps_objects: bool = False, named: dict[int, str] | None = None) -> None:
        self.keeps_objects, self.named = keeps_objects, named
        self.nodes: dict[int, tuple[Any, Any]] = {}  # by id: a value, and its packed form
        # The keys that lead to each value that is not plain, and the reason.
        self.objects: list[tuple[tuple[Any, ...], str]] = []
        self.num_marked = 0  # values that ``torch.load(weights_only=True)`` would refuse
        self.num_left = math.inf  # bytes that may still be packed

    def refuse(self, value: Any, path: tuple[Any, ...], reason: str = "") -> Any:
        """List a value in ``objects``, and return ``None``, or the value if ``keeps_objects``."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        self.objects.append((path, reason or kind.removeprefix("builtins.")))
        return value if self.keeps_objects else None

    def pack_attribute(self, value: Any, name: tuple[str, str]) -> Any:
        """Pack the value of an attribute, or refuse one that is larger than ``MAX_KEPT``."""
        self.num_left = MAX_KEPT
        try:
            return self.pack(value, name)
        except TooLargeError:
            self.nodes = {key: pair for key, pair in self.nodes.items() if pair[1] is not self}
            return self.refuse(value, name, f"larger than {MAX_KEPT >> 20} MiB")

    def spend(self, num_bytes: int) -> None:
        """Count bytes that are packed.

        Raises:
            TooLargeError: the attribute has more than ``MAX_KEPT`` bytes.
        """
        self.num_left -= num_bytes
        if self.num_left < 0:
            raise TooLargeError

    def pack(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """Pack a value; ``path`` lists the keys and indices that lead to the value."""
        if type(value) in SCALARS:
            return value
        if id(value) in self.nodes:
            node = self.nodes[id(value)][1]
            return self.refuse(value, path, "it contains itself") if node is self else node
        num_refused = len(self.objects)
        self.nodes[id(value)] = value, self  # ``self`` marks a value whose items are not packed yet
        node = self._pack(value, path)
        self.nodes[id(value)] = value, node
        if len(self.objects) > num_refused and not self.keeps_objects:
            del self.nodes[id(value)]  # another object that holds it is then refused, too
        return node

    def _pack(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in MAPPINGS:
            self.spend(256 * len(value))
            return self._mapping(value, path)
        if kind in COLLECTIONS:
            self.spend(256 * len(value))
            items = [self.pack(item, (*path, i)) for i, item in enumerate(value)]
            if kind in (list, tuple):
                return kind(items)
            if kind is deque:
                return self.marked(kind, items, value.maxlen)
            return self.marked(kind, sorted(items, key=repr))  # the same order on all ranks
        if kind in (Tensor, torch.nn.Parameter):
            return self.tensor(value, path)
        if (kind is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject:
            self.spend(value.nbytes)
            file = io.BytesIO()
            np.save(file, value, allow_pickle=False)  # with its type, shape and order
            data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
            return self.marked(np.ndarray, data, kind is np.ndarray)
        return self.refuse(value, path)

    def _mapping(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind, factory = type(value), getattr(value, "default_factory", None)
        if factory not in (None, *KINDS.values()):
            return self.refuse(value, path, "a defaultdict with a function")
        items = [(self.pack(k, (*path, k)), self.pack(v, (*path, k))) for k, v in value.items()]
        if kind is defaultdict or MARK in value or not all(map(is_plain_key, value)):
            return self.marked(kind, items, getattr(factory, "__name__", None))
        node = kind(dict(items))
        if kind is OrderedDict:
            vars(node).update(vars(value))  # the `_metadata` of a state_dict
        return node

    def tensor(self, value: Tensor, path: tuple[Any, ...]) -> Any:
        """Pack a tensor. In an attribute, the packed form is a copy of its values on the CPU."""
        if self.named is None:  # torch saves a tensor with the attributes that the user has set
            has_plain_attributes = {*map(type, vars(value).values())} <= SCALARS
            return value if has_plain_attributes else self.refuse(value, path)
        if id(value) in self.named:
            return self.refuse(value, path, f"it is {self.named[id(value)]}")
        if value.is_meta or (value.requires_grad and value.is_leaf):
            return self.refuse(
                value, path, "a tensor without values, or a tensor that requires grad"
            )
        self.spend(value.nbytes)
        data = value.detach().to("cpu", copy=True)
        return data if value.device.type == "cpu" else self.marked(Tensor, data)

    def marked(self, kind: type, items: Any, option: Any = None) -> dict[str, Any]:
        """Return a dict with the name of a class, and the packed items of its object."""
        self.num_marked += 1
        return {MARK: kind.__name__, "items": items, "option": option}


def is_plain_key(key: Any) -> bool:
    """Return whether ``torch.load(weights_only=True)`` returns a key of a dict unchanged."""
    return type(key) in SCALARS or (type(key) is tuple and all(map(is_plain_key, key)))


class Unpacker:
    """Restore the values that ``Packer`` packed, without executing code from the file.

    Args:
        device: the device for tensors that were not on the CPU.
        targets: objects of this run to fill in place, by the id of their packed values.
    """

    def __init__(self, device: Any = "cpu", targets: dict[int, Any] | None = None) -> None:
        self.device, self.targets = device, targets or {}
        self.unpacked: dict[int, Any] = {}  # by the id of the packed value

    def unpack(self, node: Any) -> Any:
        """Return the value of a packed node. Lists and dicts in the node are filled in place."""
        if type(node) in SCALARS:
            return node
        if id(node) not in self.unpacked:
            self.unpacked[id(node)] = fill_in_place(self.targets.get(id(node)), self._unpack(node))
        return self.unpacked[id(node)]

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
        values = [*map(self.unpack, items)]
        if name == "deque":
            return deque(values, option)
        if name == "defaultdict":
            return defaultdict(KINDS.get(option), values)
        return Counter(dict(values)) if name == "Counter" else KINDS[name](values)


def fill_in_place(live: Any, value: Any) -> Any:
    """Copy a value into the object ``live`` if both have the same type and shape.

    Returns:
        ``live``, or the value if it was not copied.
    """
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
