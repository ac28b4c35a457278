"""Find the weights in what was saved, and name them as the bare network does.

In: the root of a checkpoint, as data. Out: a Selection: Tensors by their new names, and the rest.
 The entry with the weights is found here, by its name or as the only one, an average before the
raw weights; names.py takes the prefixes away.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .names import is_average, quoted, rename
from .tensors import Budget, CheckpointError, Tensor, parsing
from .unpickle import Inert, Key

Place = tuple[str, ...]  # the keys that lead to a value

ENTRIES = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network")
# What training saves beside a network, and what holds tensors of its own.
_TRAINING = re.compile(r"optim|sched|scaler|rng|callbacks|loops|criterion|hyper_|hparams|config")
_MOMENTS = {"exp_avg", "momentum_buffer", "square_avg"}  # an optimizer's, for one parameter
_MAX_DEPTH = 5  # of an entry
_MAX_CONTAINERS = 100_000  # that are searched for entries, breadth first
_MAX_SHOWN = 20  # entries, in a message


@dataclass
class Selection:
    """The weights of a checkpoint by the names that the bare network has for them."""

    key: str  # the entry that holds them, in words
    tensors: dict[str, Tensor]
    sources: dict[str, str]  # their names in the file
    left_out: list[str]  # other weights of the module that holds the network
    dropped: list[str]  # what else the file holds
    notes: list[str]  # what was decided by names, and the option that decides otherwise


@parsing("what it holds")
def select(
    root: Any, key: str | None, prefix: str, ema: bool, keep_module: bool, budget: Budget
) -> Selection:
    """Choose the entry `key` (dotted where nested, "" for the whole) or the usual one, and rename.

    Raises:
        CheckpointError: nothing there is weights without doubt; the message lists what there is.
    """
    if isinstance(root, Tensor):
        size = f"of shape {root.shape} and type {root.dtype}"
        raise CheckpointError(f"a bare tensor {size}, not a network's weights")
    entries = dict(_items(root))
    if "ds_version" in entries and key is None:
        raise CheckpointError("a part of a DeepSpeed checkpoint; run its zero_to_fp32.py first")
    place, notes = _usual_place(root, ema, budget) if key is None else (_lookup(root, key), [])
    if place is None or not _holds_weights(_at(root, place)):
        raise CheckpointError(_refusal(root, key))
    value = _at(root, place)
    state = _state(value, budget)
    # An average beside a LightningModule's weights may be that of the network alone.
    main = dict(_items(entries.get("state_dict", entries.get("model"))))
    is_inside = not main or any(name in main for name in state)
    is_lightning = "pytorch-lightning_version" in entries and place != () and is_inside
    if isinstance(value, Inert):
        is_lightning = "prepare_data_per_node" in value.state
    new_names, name_notes = rename(state, prefix, is_lightning, ema, keep_module)
    chosen = Selection(".".join(place) or "the whole file", {}, {}, [], [], notes + name_notes)
    for depth in range(len(place)):
        others = (name for name, _ in _items(_at(root, place[:depth])) if name != place[depth])
        chosen.dropped += [".".join((*place[:depth], other)) for other in others]
    _sort(chosen, state, new_names, place)
    return chosen


def _sort(
    chosen: Selection, state: dict[str, Any], new_names: dict[str, str], place: Place
) -> None:
    """Sort the values into what is taken, left out and dropped."""
    seen: set[int] = set()
    for old, value in state.items():
        new = new_names.get(old)
        if new is None:
            is_weight = _is_tensor(value) and not old.endswith("n_averaged")  # a wrapper's counter
            rest = chosen.left_out if is_weight else chosen.dropped
            rest.append(old.partition(".")[0] + (".*" if "." in old else ""))
        elif isinstance(value, Tensor):
            chosen.tensors[new], chosen.sources[new] = value, old
        elif _is_tensor(value):
            raise CheckpointError(f"{old} is not a dense tensor ({value.name}); make it one first")
        elif _holds_tensors(value, seen) and not old.endswith("_extra_state"):
            others = f"{chosen.key} holds tensors, and {old} in it others"
            raise CheckpointError(f"{others}{_options(value, (*place, old))}")
        else:
            chosen.dropped.append(f"{old} (not a tensor)")
    if not chosen.tensors:
        raise CheckpointError("what would be taken holds no tensor; --prefix and --key choose")
    chosen.left_out = list(dict.fromkeys(chosen.left_out))
    chosen.dropped = list(dict.fromkeys(chosen.dropped))


def _usual_place(root: Any, ema: bool, budget: Budget) -> tuple[Place | None, list[str]]:
    """Return the place of the weights, where there is no doubt, and notes on an average."""
    if dict(_items(root)).keys() >= {"current_model_state", "state_dict"}:
        # Lightning's WeightAveraging.
        if not ema:
            return ("current_model_state",), []
        return ("state_dict",), ["state_dict is the average; --no-ema takes current_model_state"]
    places = _places(root)
    averages = {p: v for p, v in places.items() if any(map(is_average, p)) and _is_state(v)}
    others = {p: v for p, v in places.items() if not any(map(is_average, p))}
    named: Iterator[Place] = ((name,) for name in ENTRIES if _is_state(others.get((name,))))
    raw = next(named, None)
    if raw is None:
        own = [place for place in others if not (place and _TRAINING.search(place[0]))]
        if not own:
            return next(iter(averages), None) if ema else None, []
        # If there are others, beside it or deeper in it, they would be lost.
        raw = own[0] if len(own) == 1 and len(own[0]) <= 1 else None
        if raw is None or not _is_state(others[raw], is_guess=True):
            return None, []
    names = _tensor_names(others[raw], budget) if averages and ema else set()
    for place, value in averages.items() if names else ():
        # An average of the parameters alone has no BatchNorm buffers, and is not the weights.
        if not _TRAINING.search(place[0]) and _tensor_names(value, budget) == names:
            note = f"{'.'.join(place)} is the average of {'.'.join(raw)}; --no-ema takes that"
            return place, [note]
    return raw, []


def _is_state(value: Any, is_guess: bool = False) -> bool:
    """Whether a value is a state_dict, as tensors beside a config or in a list are not.

    With `is_guess`, since its name says nothing, one tensor must have dimensions and not be of
    bytes: statistics often have no dimensions, and states of random generators are bytes.
    """
    if _is_module(value):
        return True
    if not isinstance(value, dict):
        return False
    if any(isinstance(v, dict) and not n.endswith("_extra_state") for n, v in _items(value)):
        return False
    tensors = [item for _, item in _items(value) if _is_tensor(item)]
    if not is_guess or len(tensors) == len(value):
        return bool(tensors)
    return any(not isinstance(t, Tensor) or (t.shape and t.dtype != "uint8") for t in tensors)


def _refusal(root: Any, key: str | None) -> str:
    """Say that there are no weights, what there is, and what could be meant."""
    where = f"at --key {quoted(key)}" if key is not None else "in a usual place"
    inside = ", ".join(name for name, _ in [*_items(root)][:_MAX_SHOWN])
    return f"no weights {where}; it holds: {inside}{_options(root)}"


def _options(value: Any, start: Place = ()) -> str:
    """Return what takes the weights in a value that lies at a place."""
    places = _places(value)
    parents = {place[:depth] for place in places for depth in range(len(place))}
    keys = [".".join((*start, *place)) for place in places if place not in parents][:5]
    options = " or ".join(f"--key {quoted(key)}" for key in keys)
    return f"; take one with {options}" if options else ""


def _places(root: Any) -> dict[Place, Any]:
    """Return what holds tensors itself and is no optimizer's state, outermost first."""
    places: dict[Place, Any] = {}
    todo: list[tuple[Place, Any]] = [((), root)]
    seen = {id(root)}
    for place, value in todo:
        is_optimizer = isinstance(value, dict) and not _MOMENTS.isdisjoint(value)
        if _holds_weights(value) and not is_optimizer:
            places[place] = value
        for name, inner in _items(value) if len(place) < _MAX_DEPTH else ():
            if len(todo) == _MAX_CONTAINERS:
                break
            if isinstance(inner, dict | list | tuple | Inert) and id(inner) not in seen:
                seen.add(id(inner))
                todo.append(((*place, name), inner))
    return places


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container holds, by name or number."""
    if isinstance(value, dict):
        yield from ((str(n), v) for n, v in value.items() if isinstance(n, str | Key))
    elif isinstance(value, list | tuple):
        yield from ((str(i), item) for i, item in enumerate(value))


def _lookup(root: Any, key: str) -> Place | None:
    """Return the place of a dotted key, whose parts may themselves contain dots."""
    if not key:
        return ()
    names = [name for name, _ in _items(root) if f"{key}.".startswith(f"{name}.")]
    if not names:
        return None
    name = max(names, key=len)
    rest = _lookup(_at(root, (name,)), key[len(name) + 1 :])
    return None if rest is None else (name, *rest)


def _at(root: Any, place: Place) -> Any:
    for name in place:
        root = next(item for n, item in _items(root) if n == name)
    return root


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or an Inert for one that is sparse, quantized and the like."""
    odd = ("torch._utils._rebuild", "torch.nn.parameter.", "torch._tensor._rebuild")
    return isinstance(value, Tensor) or (isinstance(value, Inert) and value.name.startswith(odd))


def _is_module(value: Any) -> bool:
    """Whether a value is a pickled nn.Module, of whatever class."""
    fields = value.state if isinstance(value, Inert) else None
    return isinstance(fields, dict) and isinstance(fields.get("_modules"), dict)


def _holds_weights(value: Any) -> bool:
    return _is_module(value) or any(_is_tensor(item) for _, item in _items(value))


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """Whether tensors are anywhere in a value, except in what was `seen`, by its id."""
    todo = [value]
    while todo:
        value = todo.pop()
        if _is_tensor(value):
            return True
        inside: Any = value if type(value) in (list, tuple) else ()
        if isinstance(value, dict):
            inside = value.values()
        elif isinstance(value, Inert):
            inside = value.args, value.state, value.items
        if inside and id(value) not in seen:
            seen.add(id(value))
            todo += inside
    return False


def _state(value: Any, budget: Budget) -> dict[str, Any]:
    """Return a value's tensors and other entries by their names."""
    if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
        raise CheckpointError("what would be taken holds names that are not text")
    state = _module_state(value, budget) if isinstance(value, Inert) else dict(_items(value))
    num_parts = sum(name.count(".") for name in state)
    budget.spend(Budget.NAME_COST * len(state) + Budget.PART_COST * num_parts)
    return state


def _module_state(root: Inert, budget: Budget) -> dict[str, Any]:
    """Return the state_dict of a pickled module whose class need not exist."""
    state: dict[str, Any] = {}
    todo = [("", root)]
    while todo:
        prefix, module = todo.pop()
        fields = module.state if isinstance(module.state, dict) else {}
        parameters, buffers, children = (
            fields.get(kind) or {} for kind in ("_parameters", "_buffers", "_modules")
        )
        # Modules may contain each other, or share a child under many names.
        budget.spend(64 + sum(64 + len(prefix) for _ in (*parameters, *buffers, *children)))
        if "OptimizedModule" in module.name:  # of torch.compile, which pickles its argument
            todo += [(prefix, arg) for arg in module.args[:1] if isinstance(arg, Inert)]
        hidden = fields.get("_non_persistent_buffers_set") or ()
        values = parameters | {n: value for n, value in buffers.items() if n not in hidden}
        state |= {f"{prefix}{n}": value for n, value in values.items() if value is not None}
        modules = [(f"{prefix}{n}.", m) for n, m in children.items() if isinstance(m, Inert)]
        todo += reversed(modules)
    return state


def _tensor_names(value: Any, budget: Budget) -> set[str]:
    """Return the names of the tensors without wrappers; none if they cannot be named."""
    try:
        names = [name for name, item in _state(value, budget).items() if _is_tensor(item)]
        return {*rename(names, "auto", False, True, False)[0].values()}
    except CheckpointError:
        return set()
