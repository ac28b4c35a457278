"""Find the weights in what was saved, and name them as the bare network does.

In: the root of a checkpoint, as data. Out: a Selection: Tensors by their new names, and the rest.
The weights are the entry that `--key` names; else one of ENTRIES or the whole file, or an average
beside it that has the same names. names.py takes the prefixes away.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .names import is_average, quoted, rename
from .tensors import Budget, CheckpointError, Tensor, parsing
from .unpickle import Inert

Place = tuple[str, ...]  # the keys that lead to a value

ENTRIES = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network")
_MAX_SHOWN = 20  # entries, in a message


@dataclass
class Selection:
    """The weights of a checkpoint by the names that the bare network has for them."""

    key: str  # the entry that holds them, in words
    notes: list[str]  # what was decided by names, and the option that decides otherwise
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # their names in the file
    left_out: list[str] = field(default_factory=list)  # other weights of the module around them
    dropped: list[str] = field(default_factory=list)  # what else the file holds


@parsing("what it holds")
def select(
    root: Any, key: str | None, prefix: str, ema: bool, keep_module: bool, budget: Budget
) -> Selection:
    """Choose the entry `key` (dotted where nested, "" for the whole) or the usual one, and rename.

    Raises:
        CheckpointError: nothing there is weights without doubt; the message lists what there is.
    """
    entries: dict[str, Any] = root if isinstance(root, dict) else {}
    place, notes = _usual_place(root, ema, budget) if key is None else (_lookup(root, key), [])
    if place is None or not _holds_weights(_at(root, place)):
        where = f"at --key {quoted(key)}" if key is not None else "in a usual place"
        inside = ", ".join(name for name, _ in islice(_items(_at(root, place or ())), _MAX_SHOWN))
        names_one = "take one with --key NAME, dotted where it is nested"
        raise CheckpointError(f"no weights {where}, which holds: {inside}; {names_one}")
    state = _state(_at(root, place), budget)
    # An average beside a LightningModule's weights may be that of the network alone.
    module = entries.get("state_dict")
    is_inside = isinstance(module, dict) and any(name in module for name in state)
    is_lightning = "pytorch-lightning_version" in entries and is_inside
    new_names, name_notes = rename(state, prefix, is_lightning, ema, keep_module)
    chosen = Selection(".".join(place) or "the whole file", notes + name_notes)
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
            option = f"--key {quoted('.'.join((*place, old)))} takes these"
            raise CheckpointError(f"{chosen.key} holds tensors, and {old} in it others; {option}")
        else:
            chosen.dropped.append(f"{old} (not a tensor)")
    if not chosen.tensors:
        raise CheckpointError("what would be taken holds no tensor; --prefix and --key choose")
    chosen.left_out = list(dict.fromkeys(chosen.left_out))
    chosen.dropped = list(dict.fromkeys(chosen.dropped))


def _usual_place(root: Any, ema: bool, budget: Budget) -> tuple[Place | None, list[str]]:
    """Return where the weights are, if there is no doubt, and a note on an average."""
    entries: dict[str, Any] = root if isinstance(root, dict) else {}
    if entries.keys() >= {"current_model_state", "state_dict"}:
        # Lightning's WeightAveraging.
        if not ema:
            return ("current_model_state",), []
        return ("state_dict",), ["state_dict is the average; --no-ema takes current_model_state"]
    raw = next((name for name in ENTRIES if _is_state(entries.get(name))), None)
    if raw is None:
        return () if _is_state(root) else None, []
    averages = [n for n, value in _items(root) if ema and is_average(n) and _is_state(value)]
    for name in averages:
        # An average of the parameters alone has no BatchNorm buffers, and is not the weights.
        if _bare_names(entries[name], budget) == _bare_names(entries[raw], budget):
            return (name,), [f"{name} is the average of {raw}; --no-ema takes that"]
    return (raw,), []


def _is_state(value: Any) -> bool:
    """Whether a value is a module or a state_dict, which holds no other dicts."""
    if not isinstance(value, dict):
        return _is_module(value)
    names = (name for name, item in value.items() if isinstance(item, dict))
    if any(not (isinstance(name, str) and name.endswith("_extra_state")) for name in names):
        return False
    return _holds_weights(value)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container holds, by name or number."""
    if isinstance(value, dict):
        yield from ((name, item) for name, item in value.items() if isinstance(name, str))
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
    budget.spend(Budget.NAME * len(state) + Budget.PART * num_parts)
    return state


def _module_state(root: Inert, budget: Budget) -> dict[str, Any]:
    """Return the state_dict of a pickled module whose class need not exist."""
    state: dict[str, Any] = {}
    todo = [("", root)]
    while todo:
        prefix, module = todo.pop()
        fields: dict[str, Any] = module.state if isinstance(module.state, dict) else {}
        parameters, buffers, children = (
            fields.get(kind) or {} for kind in ("_parameters", "_buffers", "_modules")
        )
        hidden = fields.get("_non_persistent_buffers_set") or ()
        # Modules may contain each other, or share a child under many names.
        num_names = 1 + sum(map(len, (parameters, buffers, children, hidden)))
        budget.spend(num_names * (Budget.NAME + len(prefix)))
        hidden = {name for name in hidden if isinstance(name, str)}
        values = parameters | {n: value for n, value in buffers.items() if n not in hidden}
        state |= {f"{prefix}{n}": value for n, value in values.items() if value is not None}
        modules = [(f"{prefix}{n}.", m) for n, m in children.items() if isinstance(m, Inert)]
        todo += reversed(modules)
    return state


def _bare_names(value: Any, budget: Budget) -> set[str]:
    """Return the names of the tensors without wrappers."""
    names = [name for name, item in _state(value, budget).items() if _is_tensor(item)]
    return {*rename(names, "auto", False, True, False)[0].values()}
