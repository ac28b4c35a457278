"""A value of Python as numbers, text, lists, dicts and tensors; ``placing`` makes it of them anew.

What is plain stays itself. Anything else becomes a dict whose key ``"#"`` says what it was. An
object that is reached twice is packed once, so that it is one object again.
"""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torchmetrics import Metric

from harness.checkpoints.belongings import (
    NAMESPACES,
    attributes_of,
    class_name,
    is_silent,
    named_attributes,
)
from harness.checkpoints.contents import odd_values
from harness.checkpoints.unpickling import KINDS
from harness.places import is_owners_class
from harness.upstream.logged_values import metric_counts, metrics_in

MOST_OBJECTS, MOST_DEPTH = 100_000, 60  # of one attribute
NUMBER_BYTES = 9
TEXTS = {str, bytes}
SCALARS = {type(None), bool, int, float, complex, *TEXTS}
SETS = (set, frozenset)
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
CONTAINERS = (list, tuple, deque, *SETS, *MAPPINGS)
FLAT = (list, tuple, deque, dict, OrderedDict, Counter)  # stay themselves where parts are scalars
PLAIN = {*KINDS, torch.dtype, torch.Size} - {*CONTAINERS}
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
Reference = dict[int, str]  # names of what a checkpoint holds in another place, by id


class UnkeptError(Exception):
    """Says why a value cannot be packed."""


class Packer:
    """Packs values of one process.

    Args:
        known: parameters, modules, optimizers and others that are only named.
        first: what was there when training began, by id, which is filled in place later. Without
            it values are packed to be compared: what cannot be kept counts by its identity.
        most_bytes: of all that is packed.
    """

    def __init__(self, known: Reference, first: dict[int, Any] | None, most_bytes: float) -> None:
        self.known, self.first, self.most_bytes = known, first, most_bytes
        self.packed: dict[int, tuple[Any, Any]] = {}  # by id: the object, what it has become
        self.num_bytes = self.num_objects = self.depth = 0

    def pack(self, value: Any) -> Any:
        """Pack the value of an attribute; nothing is left of one that cannot be kept.

        Raises:
            UnkeptError: it cannot be.
        """
        num_packed, num_bytes = len(self.packed), self.num_bytes
        self.num_objects = self.depth = 0
        try:
            return self._pack(value)
        except Exception as error:
            for key in list(self.packed)[num_packed:]:
                del self.packed[key]
            self.num_bytes = num_bytes
            if isinstance(error, UnkeptError):
                raise
            # An author's `state_dict`, or a property.
            raise UnkeptError(f"{class_name(value)}: {error}") from error

    def _pack(self, value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS:
            self._count(len(value) if kind in TEXTS else NUMBER_BYTES)
            return value
        if id(value) in self.known:
            return {"#": "known", "name": self.known[id(value)]}
        if id(value) in self.packed:
            return self.packed[id(value)][1]
        if is_silent(value):
            return {"#": "silent"}
        self.num_objects += 1
        self.depth += 1
        if self.num_objects > MOST_OBJECTS or self.depth > MOST_DEPTH:
            raise UnkeptError("too many objects")
        try:
            return self._pack_object(value, kind)
        finally:
            self.depth -= 1

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self.most_bytes:
            raise UnkeptError(f"more than {self.most_bytes / 2**20:g} MB with the others")

    def _note(self, value: Any, node: Any) -> Any:
        """Remember what a value becomes, before its parts are packed: they may hold it."""
        if self.first is not None and id(value) in self.first:
            node = {"#": "same", "of": node}
        self.packed[id(value)] = value, node
        return node

    def _pack_object(self, value: Any, kind: type) -> Any:
        if kind in CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return self._container(value, kind)
        if isinstance(value, torch.Tensor):
            return self._note(value, self._tensor(value))
        if isinstance(value, (np.ndarray, np.generic)):
            is_plain = kind is np.ndarray or isinstance(value, np.generic)
            if not is_plain or value.dtype.hasobject:
                return self._opaque(value)
            if value.dtype.names:
                raise UnkeptError("an array of structures")
            self._count(value.nbytes)
            return self._note(value, value)
        if kind is bytearray:
            self._count(len(value))
            return self._note(value, {"#": "bytearray", "data": bytes(value)})
        if isinstance(value, Enum):
            return {"#": "enum", "class": class_name(value), "name": value.name}
        if kind in PLAIN or isinstance(value, np.dtype):
            return self._opaque(value) if odd_values(value) else value
        if kind in GENERATORS:
            on_device = isinstance(value, torch.Generator) and value.device.type != "cpu"
            node = {"#": "generator", "class": class_name(value), "is_on_device": on_device}
            return self._stated(value, node, generator_state(value))
        if isinstance(value, Metric):
            return self._stated(value, {"#": "metric"}, metric_counts(value))
        if isinstance(value, nn.Module):
            return self._filled(value, {"#": "module"}, **module_parts(value))
        return self._other(value, kind)

    def _container(self, value: Any, kind: type) -> Any:
        kinds = {*map(type, value)}
        if kind in MAPPINGS:
            kinds |= {dict} if "#" in value else {*map(type, value.values())}
        if kinds <= SCALARS and kind in FLAT:
            texts = [item for item in value if type(item) in TEXTS] if kinds & TEXTS else []
            size = NUMBER_BYTES * len(value) * (2 if kind in MAPPINGS else 1)
            self._count(size + sum(map(len, texts)))
            return value if kind is tuple else self._note(value, value)
        if isinstance(value, tuple):
            parts = [self._pack(item) for item in value]
            named = {"#": "namedtuple", "class": class_name(value), "items": parts}
            return tuple(parts) if kind is tuple else named
        if kind is list:
            items: list[Any] = []
            node = self._note(value, items)
            items.extend(self._pack(item) for item in value)
            return node
        if kind in MAPPINGS:
            node = {"#": "mapping", "class": kind.__name__}
            factory = getattr(value, "default_factory", None)
            if factory is not None and factory not in FACTORIES.values():
                node["factory"] = "live"
            elif factory is not None:
                node["factory"] = factory.__name__
            return self._filled(value, node, keys=list(value), values=list(value.values()))
        # The order of a set differs between processes.
        ordered = sorted(value, key=repr) if kind in SETS else list(value)
        node = {"#": "items", "class": kind.__name__, "maxlen": getattr(value, "maxlen", None)}
        return self._filled(value, node, items=ordered)

    def _filled(self, value: Any, node: dict[str, Any], **parts: Any) -> Any:
        """Pack the parts of a value that may hold itself."""
        noted = self._note(value, node)
        for name, part in parts.items():
            # These containers are ours: no other object holds them.
            node[name] = [self._pack(p) for p in part] if type(part) is list else self._pack(part)
        return noted

    def _stated(self, value: Any, node: dict[str, Any], state: Any) -> Any:
        """Pack a state that an object has made, and loads itself: nobody else holds its parts."""
        noted = self._note(value, node)
        apart = Packer(self.known, None if self.first is None else {}, self.most_bytes)
        apart.num_bytes = self.num_bytes
        node["state"] = apart.pack(state)
        self.num_bytes = apart.num_bytes
        return noted

    def _tensor(self, value: torch.Tensor) -> Any:
        if type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta:
            return self._opaque(value)
        if value.layout is not torch.strided or value.is_quantized:
            data = value.detach().cpu()
            self._count(data.element_size() * data.numel())
        else:
            self._count(value.nbytes)
            data = value.detach().resolve_conj().resolve_neg().cpu()
            if data.untyped_storage().nbytes() > data.nbytes:
                data = data.clone()  # torch would save all that it is a view of
        is_leaf = value.requires_grad and value.is_leaf
        if value.device.type == "cpu" and not is_leaf:
            return data
        return {
            "#": "tensor",
            "data": data,
            "is_on_device": value.device.type != "cpu",
            "requires_grad": is_leaf,
            "is_parameter": type(value) is nn.Parameter,
        }

    def _other(self, value: Any, kind: type) -> Any:
        is_first = self.first is None or id(value) in self.first
        if hasattr(kind, "__next__"):
            raise UnkeptError("an iterator, whose position is not known")
        methods = [getattr(value, name, None) for name in ("state_dict", "load_state_dict")]
        if is_first and all(map(callable, methods)):
            return self._stated(value, {"#": "stateful"}, value.state_dict())
        attributes = attributes_of(value)
        if attributes is None:
            return self._opaque(value)
        if not is_first and not is_owners_class(kind) and kind not in NAMESPACES:
            raise UnkeptError(f"a {class_name(value)} that was made in training")
        node = {"#": "object", "class": class_name(value)}
        parts: dict[str, Any] = {"names": list(attributes), "values": list(attributes.values())}
        if isinstance(value, dict):
            parts |= {"keys": list(value), "items": list(value.values())}
        elif isinstance(value, (list, deque, set)):
            parts["items"] = list(value)
        return self._filled(value, node, **parts)

    def _opaque(self, value: Any) -> Any:
        if self.first is None:
            return {"#": "opaque", "id": id(value)}
        if id(value) not in self.first:
            raise UnkeptError(f"a {class_name(value)}")
        return {"#": "opaque"}


FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, deque, Counter, OrderedDict)
}


def generator_state(value: Any) -> Any:
    """The state of a generator of torch, NumPy or Python."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return value.getstate()


def module_parts(module: nn.Module) -> dict[str, Any]:
    """What a network that no other one registers consists of."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    attributes = dict(named_attributes(module))
    metrics = dict(metrics_in(module))
    return {
        "metrics": list(metrics),
        "counts": [metric_counts(metric) for metric in metrics.values()],
        "names": list(tensors),
        "tensors": list(tensors.values()),
        "paths": list(attributes),
        "values": list(attributes.values()),
    }
