"""Find the weights in what was saved, and name them as the bare network does.

In: the root of a checkpoint, as data. Out: a Selection: Tensors by their new names, and the rest.
The weights are the entry that `--key` names; else one of ENTRIES or the whole file, or an average
beside it that has the same names. Four rules name them:
- `_orig_mod` and its like (WRAPPERS) are wrappers wherever they are a whole part of a name.
- `module` (DataParallel, DDP) is a wrapper where it is the only child of its parent; `n_averaged`
  beside it is AveragedModel's counter and goes with it.
- A LightningModule's network is its child `net` or `model`, or an average of that with its names.
- A prefix that is given says where the network is, and below it `module` is no wrapper.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .tensors import Budget, CheckpointError, Tensor, parsing
from .unpickle import Inert

ENTRIES = ("state_dict", "model_state_dict", "model")
NETWORKS = ("net", "model")  # what a LightningModule usually calls its network
# Names that only wrappers use: torch.compile, FSDP, activation checkpointing, Fabric.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_AVERAGE = re.compile(r"(?i)(?<![a-z])(ema|swa|averaged?)(?![a-z])")
_MAX_SHOWN = 20  # entries, in a message
Path = tuple[str, ...]  # the parts of a name


@dataclass
class Selection:
    """The weights of a checkpoint by the names that the bare network has for them."""

    key: str  # the entry that holds them, as it is shown to a person
    notes: list[str]  # what was decided by names, and the option that decides otherwise
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # their names in the file
    left_out: list[str] = field(default_factory=list)  # what else the file holds


@parsing()
def select(root: Any, key: str | None, prefix: str, ema: bool, budget: Budget) -> Selection:
    """Choose the entry `key` (dotted where nested, "" for the whole) or the usual one, and rename.

    Raises:
        CheckpointError: nothing there is weights without doubt; the message lists what there is.
    """
    entries = root if isinstance(root, dict) else {}
    place, notes = _usual_place(root, ema, budget) if key is None else (key, [])
    found, others = (None, []) if place is None else _find(root, place)
    if place is None or not _holds_weights(found, budget):
        where = "in a usual place" if key is None else f"at --key {key!r}"
        inside = ", ".join(name for name, _ in islice(_items(root), _MAX_SHOWN))
        names_one = "take one with --key NAME, dotted where it is nested"
        raise CheckpointError(f"no weights {where} of the entries {inside}; {names_one}")
    state = _state(found, budget)
    new_names, name_notes = rename(state, prefix, "pytorch-lightning_version" in entries, ema)
    chosen = Selection(place or "the whole file", notes + name_notes, left_out=others)
    for old, value in state.items():
        _put(chosen, old, value, new_names.get(old), budget)
    if not chosen.tensors:
        raise CheckpointError("what would be taken holds no tensor; --prefix and --key choose")
    chosen.left_out = list(dict.fromkeys(chosen.left_out))
    return chosen


def _put(chosen: Selection, old: str, value: Any, new: str | None, budget: Budget) -> None:
    """Take a value by its new name, or list it among what is not taken."""
    if new is None:
        chosen.left_out.append(old.partition(".")[0] + (".*" if "." in old else ""))
    elif isinstance(value, Tensor):
        chosen.tensors[new], chosen.sources[new] = value, old
    elif _is_tensor(value):
        raise CheckpointError(f"{old} is not a dense tensor ({value.name}); make it one first")
    elif _holds_weights(value, budget) and not old.endswith("_extra_state"):
        raise CheckpointError(f"{old} holds tensors beside those of {chosen.key}; --key takes one")
    else:
        chosen.left_out.append(f"{old} (not a tensor)")


def _usual_place(root: Any, ema: bool, budget: Budget) -> tuple[str | None, list[str]]:
    """Return the entry with the weights, if there is no doubt, and a note on an average."""
    entries: dict[str, Any] = root if isinstance(root, dict) else {}
    if entries.keys() >= {"current_model_state", "state_dict"}:
        # Lightning's WeightAveraging.
        if not ema:
            return "current_model_state", []
        return "state_dict", ["state_dict is the average; --no-ema takes current_model_state"]
    raw = next((name for name in ENTRIES if _is_state(entries.get(name), budget)), None)
    if raw is None:
        return "" if _is_state(root, budget) else None, []
    for name, value in _items(root) if ema else ():
        # An average of the parameters alone has no BatchNorm buffers, and is not the weights.
        if (
            _AVERAGE.search(name)
            and _is_state(value, budget)
            and _bare_names(value, budget) == _bare_names(entries[raw], budget)
        ):
            return name, [f"{name} is the average of {raw}; --no-ema takes that"]
    return raw, []


def _find(root: Any, key: str) -> tuple[Any, list[str]]:
    """Follow a dotted key; return what is there, and the names beside it."""
    beside: list[str] = []
    for part in key.split(".") if key else ():
        items = dict(_items(root))
        beside += [name for name in items if name != part]
        root = items.get(part)
    return root, beside


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container holds, by name or number."""
    if isinstance(value, dict):
        yield from ((name, item) for name, item in value.items() if isinstance(name, str))
    elif isinstance(value, list | tuple):
        yield from ((str(i), item) for i, item in enumerate(value))


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, or an Inert for a sparse, quantized or similar one."""
    odd = ("torch._utils._rebuild", "torch.nn.parameter.", "torch._tensor._rebuild")
    return isinstance(value, Tensor) or (isinstance(value, Inert) and value.name.startswith(odd))


def _is_module(value: Any) -> bool:
    """Return whether a value is a pickled nn.Module, of whatever class."""
    fields = value.state if isinstance(value, Inert) else None
    return isinstance(fields, dict) and isinstance(fields.get("_modules"), dict)


def _holds_weights(value: Any, budget: Budget) -> bool:
    """Return whether a value is a module, or holds tensors itself."""
    inside: Any = value if type(value) in (list, tuple) else ()
    if isinstance(value, dict):
        inside = value.values()
    budget.spend(len(inside))  # a file may repeat one of them under many names
    return _is_module(value) or any(map(_is_tensor, inside))


def _is_state(value: Any, budget: Budget) -> bool:
    """Return whether a value is a module or a state_dict, which holds no other dicts."""
    if not isinstance(value, dict):
        return _is_module(value)
    return _holds_weights(value, budget) and not any(
        isinstance(item, dict) and not name.endswith("_extra_state") for name, item in _items(value)
    )


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
        parameters, buffers, children, hidden = (
            fields.get(kind) or {}
            for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
        )
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
    return {*rename(names, "auto", False, True)[0].values()}


def rename(
    names: Iterable[str], prefix: str, is_lightning: bool, ema: bool
) -> tuple[dict[str, str], list[str]]:
    """Return the new name of each weight that is taken, and notes on what was decided by names.

    With `is_lightning` the names begin at a LightningModule, and prefix "auto" finds the network
    in it, with `ema` its average.

    Raises:
        CheckpointError: nothing has that prefix, or two names would become one.
    """
    notes: list[str] = []
    paths: dict[str, Path] = {}
    for name in names:
        *modules, leaf = name.split(".")
        paths[name] = (*(part for part in modules if part not in WRAPPERS), leaf)
    is_unclear, network = False, tuple(part for part in prefix.split(".") if part)
    if prefix == "auto":
        paths, is_unclear = _without_module(paths)
        network, notes = _network(paths.values(), ema) if is_lightning else ((), [])
    if is_unclear:
        option = f"--prefix {'.'.join(network)!r} takes it for the network's own child"
        notes = [f"`module` was taken for a wrapper (DataParallel, DDP); {option}", *notes]
    depth, owners = len(network), dict[str, str]()
    for name, path in paths.items():
        if path[:depth] == network and path[depth:]:
            new = ".".join(path[depth:])
            if owners.setdefault(new, name) != name:
                raise CheckpointError(f"{owners[new]} and {name} would both become {new}")
    if not owners:
        raise CheckpointError(f"nothing is called {prefix}.*; --prefix '' --list shows all names")
    return {name: new for new, name in owners.items()}, notes


def _without_module(paths: dict[str, Path]) -> tuple[dict[str, Path], bool]:
    """Take away each `module` that is a wrapper, and say whether only its name tells that."""
    children: defaultdict[Path, set[str]] = defaultdict(set)
    for path in paths.values():
        for depth, part in enumerate(path):
            children[path[:depth]].add(part)
    wrapped = {
        place: names
        for place, names in children.items()
        if names <= {"module", "n_averaged"} and (*place, "module") in children
    }
    stripped = {
        name: tuple(part for depth, part in enumerate(path) if path[:depth] not in wrapped)
        for name, path in paths.items()
        if path[-1] != "n_averaged" or path[:-1] not in wrapped  # a counter is no weight
    }
    return stripped, {"module"} in wrapped.values()


def _network(paths: Iterable[Path], ema: bool) -> tuple[Path, list[str]]:
    """Return the place of a LightningModule's network, or of its average."""
    children: defaultdict[str, set[Path]] = defaultdict(set)
    for path in paths:
        children[path[0]].add(path[1:])
    network = next((name for name in NETWORKS if name in children), None)
    if network is None or () in children[network]:
        return (), []
    for name, inside in children.items() if ema else ():
        if _AVERAGE.search(name) and inside == children[network]:
            return (name,), [f"{name} is the average of {network}; --no-ema takes {network}"]
    return (network,), []
