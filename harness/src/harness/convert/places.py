"""What was saved, as data: containers, each at its place, and pickled modules."""

from collections.abc import Iterator
from typing import Any

from .sources import quoted
from .tensors import Budget, Tensor
from .unpickle import Inert, Key

Place = tuple[str, ...]

_MOMENTS = {"exp_avg", "momentum_buffer", "square_avg"}  # an optimizer's, for one parameter
_CONTAINERS = (dict, list, tuple, Inert)
_MAX_PLACES = 100_000  # containers that are searched
_MAX_DEPTH = 10  # of a place


def places_of(root: Any, start: Place = ()) -> dict[Place, Any]:
    """Return what holds tensors of its own and is no optimizer's, outermost first, by its place."""
    found: dict[Place, Any] = {}
    todo, seen = [(start, root)], {id(root)}
    for place, value in todo:
        if isinstance(value, Inert) and not is_module(value):
            content = value.items or value.state
            if id(content) in seen:
                continue  # of several objects with one state the first will do
            seen.add(id(content))
        is_optimizer = isinstance(value, dict) and not _MOMENTS.isdisjoint(value)
        if is_weights(value) and not is_optimizer:
            found[place] = value
        for name, inner in items(value) if len(place) < _MAX_DEPTH else ():
            if len(todo) == _MAX_PLACES:
                break
            if isinstance(inner, _CONTAINERS) and inner and id(inner) not in seen:
                seen.add(id(inner))
                todo.append(((*place, name), inner))
    return found


def items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container holds, by name or number; a pickled module and a tensor hold nothing.

    A dict of a class that is not known is one, and another object holds its attributes.
    """
    if isinstance(value, Inert) and not is_module(value) and not is_odd_tensor(value):
        is_dict = value.items and all(type(i) is tuple and len(i) == 2 for i in value.items)
        if is_dict:
            yield from ((name, item) for name, item in value.items if isinstance(name, str))
            return
        value = value.items or value.state
    if isinstance(value, dict):
        yield from ((str(n), v) for n, v in value.items() if isinstance(n, str | Key))
    elif isinstance(value, list | tuple):
        yield from ((str(i), item) for i, item in enumerate(value))


def lookup(root: Any, key: str) -> Place | None:
    """Return the place of a dotted key, whose parts may themselves contain dots."""
    if not key:
        return ()
    names = [name for name, _ in items(root) if f"{key}.".startswith(f"{name}.")]
    if not names:
        return None
    name = max(names, key=len)
    rest = lookup(at(root, (name,)), key[len(name) + 1 :])
    return None if rest is None else (name, *rest)


def at(root: Any, place: Place) -> Any:
    """Return what lies at a place."""
    for name in place:
        root = next(item for n, item in items(root) if n == name)
    return root


def key_for(place: Place, value: Any) -> str:
    """Return the option that takes a value, if it can be taken."""
    is_odd = any(is_odd_tensor(item) for _, item in items(value))
    return "" if is_odd else f"--key {quoted('.'.join(place))}"


def is_weights(value: Any) -> bool:
    """Whether the value is a module, or holds tensors itself."""
    if isinstance(value, list | tuple):
        return any(map(is_tensor, value))
    return is_module(value) or any(is_tensor(item) for _, item in items(value))


def is_tensor(value: Any) -> bool:
    """Whether the value is a tensor, be it of a kind that is not understood."""
    return isinstance(value, Tensor) or is_odd_tensor(value)


def is_odd_tensor(value: Any) -> bool:
    """Whether the value is a tensor of a kind that is not understood: sparse, quantized, ..."""
    odd = ("torch._utils._rebuild", "torch.nn.parameter.", "torch._tensor._rebuild")
    return isinstance(value, Inert) and value.name.startswith(odd)


def holds_tensors(value: Any, seen: set[int]) -> bool:
    """Whether tensors are anywhere in the value, except in what was `seen`, by its id."""
    todo = [value]
    while todo:
        value = todo.pop()
        inside: Any = ()
        if isinstance(value, dict):
            inside = value.values()
        elif type(value) in (list, tuple):
            inside = value
        elif is_tensor(value):
            return True
        elif isinstance(value, Inert):
            inside = value.args, value.state, value.items
        if inside and id(value) not in seen:
            seen.add(id(value))
            todo += inside
    return False


def describe(value: Any) -> str:
    """Return what a value is, in a few words."""
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, Inert):
        return value.name
    if isinstance(value, dict | list | tuple):
        return f"{'dict' if isinstance(value, dict) else 'list'} of {len(value)}"
    return type(value).__name__


def is_module(value: Any) -> bool:
    """Whether the value is a pickled nn.Module, of whatever class."""
    if not isinstance(value, Inert):
        return False
    return _inner(value) is not value or isinstance(_fields(value).get("_modules"), dict)


def is_lightning_module(module: Inert) -> bool:
    """Whether a pickled module was a LightningModule."""
    return "prepare_data_per_node" in _fields(module)


def _fields(module: Inert) -> dict[str, Any]:
    return module.state if isinstance(module.state, dict) else {}


def _inner(module: Inert) -> Inert:
    """Return the module inside a wrapper of torch, or of a class derived from one, or itself."""
    fields = _fields(module)
    children, buffers = fields.get("_modules"), fields.get("_buffers")
    inside = None
    if module.name.endswith(".OptimizedModule") and isinstance(module.args, tuple):
        inside = next(iter(module.args), None)
    elif isinstance(children, dict) and list(children) == ["module"]:
        is_average = isinstance(buffers, dict) and "n_averaged" in buffers
        inside = children["module"] if is_average or "device_ids" in fields else None
    return inside if isinstance(inside, Inert) else module


def module_state(root: Inert, budget: Budget) -> dict[str, Any]:
    """Return the state_dict of a pickled module whose class need not exist."""
    state: dict[str, Any] = {}
    todo = [("", root)]
    while todo:
        prefix, module = todo.pop()
        fields, inner = _fields(module), _inner(module)
        parameters, buffers, children = (
            fields.get(kind) or {} for kind in ("_parameters", "_buffers", "_modules")
        )
        names = [*parameters, *buffers, *children]
        budget.spend(64 + sum(64 + len(prefix) + len(name) for name in names))
        if inner is not module:
            todo.append((prefix, inner))
            continue
        hidden = fields.get("_non_persistent_buffers_set") or ()
        values = parameters | {n: value for n, value in buffers.items() if n not in hidden}
        state |= {f"{prefix}{name}": value for name, value in values.items()}
        modules = [(f"{prefix}{n}.", m) for n, m in children.items() if isinstance(m, Inert)]
        todo += reversed(modules)
    return state
