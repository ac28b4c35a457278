"""Find the weights in a saved object, and give them the names of the bare network.

In: a checkpoint's ``root``, as data. Out: a ``Selection``: the tensors by their new names, and
what is left out. The weights are the entry that `--key` names. Without `--key` they are one of
``ENTRIES`` or the whole file, or an average beside them that has the same names. Four rules rename:
- `_orig_mod` and the other ``WRAPPERS`` are wrappers anywhere in a name, as a part between dots.
- `module` (DataParallel, DDP) is a wrapper if its parent has no other child. `n_averaged`, the
  counter of AveragedModel, may stand beside it and is removed with it.
- A LightningModule's network is its child `net` or `model`, or an average of it with equal names.
- The submodule that `--prefix` names is the network. Inside of it, `module` is no wrapper.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .tensors import Budget, CheckpointError, StoredTensor, parsing
from .unpickle import Inert

ENTRIES = ("state_dict", "model_state_dict", "model", "module")  # the last is DeepSpeed's
NETWORKS = ("net", "model")  # usual names of a LightningModule's network
# Names that only wrappers use: torch.compile, FSDP, activation checkpointing, Fabric.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_AVERAGE = re.compile(r"(?i)(?<![a-z])(ema|swa|averaged?)(?![a-z])")
_MAX_SHOWN = 20  # entries, in a message
NameParts = tuple[str, ...]  # the parts of a name between dots


@dataclass
class Selection:
    """The weights of a checkpoint by the names that the bare network has for them."""

    key: str  # the entry that holds them, as reports print it
    notes: list[str]  # what was decided by names alone, and the option that reverses it
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # new name -> name in the file
    left_out: list[str] = field(default_factory=list)  # other contents of the file


@parsing()
def select(root: Any, key: str | None, prefix: str, ema: bool, budget: Budget) -> Selection:
    """Choose the entry with the weights, and rename them.

    Args:
        root: the saved object.
        key: the entry; dots lead into nested ones, "" is the whole file, ``None`` the usual entry.
        prefix: the submodule that is the network; see ``rename``.
        ema: whether to prefer averaged weights.
        budget: pays for the objects that are built.

    Raises:
        CheckpointError: no entry clearly holds weights; the message lists the entries.
    """
    entries = root if isinstance(root, dict) else {}
    entry, notes = _usual_entry(root, ema, budget) if key is None else (key, [])
    found, others = (None, []) if entry is None else _find(root, entry)
    if entry is None or not _holds_weights(found, budget):
        where = f"the entries {', '.join(ENTRIES)}" if key is None else f"--key {key!r}"
        listed = ", ".join(name for name, _ in islice(_items(root), _MAX_SHOWN))
        raise CheckpointError(
            f"there are no weights at {where}. The file has the entries {listed}. Choose one of "
            "them with --key NAME, or with --key OUTER.INNER if it is nested"
        )
    state = _state(found, budget)
    new_names, name_notes = rename(state, prefix, "pytorch-lightning_version" in entries, ema)
    chosen = Selection(entry or "the whole file", notes + name_notes, left_out=others)
    for old, value in state.items():
        _put(chosen, old, value, new_names.get(old), budget)
    if not chosen.tensors:
        raise CheckpointError(
            f"{chosen.key} holds no tensor. Choose other weights with --key NAME or --prefix NAME"
        )
    chosen.left_out = list(dict.fromkeys(chosen.left_out))
    return chosen


def _put(chosen: Selection, old: str, value: Any, new: str | None, budget: Budget) -> None:
    """Add a value to the tensors under its new name, or to ``left_out``."""
    if new is None:
        chosen.left_out.append(old.partition(".")[0] + (".*" if "." in old else ""))
    elif isinstance(value, StoredTensor):
        chosen.tensors[new], chosen.sources[new] = value, old
    elif unread := _unread_tensor(value, budget):
        raise CheckpointError(
            f"{old} is not a dense tensor ({unread.name}); make it dense, or dequantize it, "
            "before you save"
        )
    elif _holds_weights(value, budget) and not old.endswith("_extra_state"):
        raise CheckpointError(
            f"{chosen.key} holds tensors, and its entry {old} holds further tensors. Choose one of "
            "the two with --key NAME"
        )
    else:
        chosen.left_out.append(f"{old} (not a tensor)")


def _usual_entry(root: Any, ema: bool, budget: Budget) -> tuple[str | None, list[str]]:
    """Return the entry that clearly holds the weights, or ``None``, and notes on an average."""
    entries: dict[str, Any] = root if isinstance(root, dict) else {}
    if entries.keys() >= {"current_model_state", "state_dict"}:
        if not ema:  # Lightning's WeightAveraging wrote both
            return "current_model_state", []
        return "state_dict", ["state_dict is the average; --no-ema chooses current_model_state"]
    raw = next((name for name in ENTRIES if _is_state(entries.get(name), budget)), None)
    if raw is None:
        return "" if _is_state(root, budget) else None, []
    for name, value in _items(root) if ema else ():
        # An average of the parameters alone lacks BatchNorm's buffers, so its names differ.
        if (
            _AVERAGE.search(name)
            and _is_state(value, budget)
            and _bare_names(value, budget) == _bare_names(entries[raw], budget)
        ):
            return name, [f"{name} is the average of {raw}; --no-ema chooses {raw}"]
    return raw, []


def _find(root: Any, key: str) -> tuple[Any, list[str]]:
    """Follow a dotted key. Return the value there, and the names beside each name of the key.

    A name may itself have dots: the longest name that fits counts.
    """
    siblings: list[str] = []
    while key:
        items = dict(_items(root))
        part = max(
            (name for name in items if f"{key}.".startswith(f"{name}.")), key=len, default=""
        )
        siblings += [name for name in items if name != part]
        root, key = (items[part], key[len(part) + 1 :]) if part else (None, "")
    return root, siblings


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a container's items, each with its name or number."""
    if isinstance(value, dict):
        yield from ((name, item) for name, item in value.items() if isinstance(name, str))
    elif isinstance(value, list | tuple):
        yield from ((str(i), item) for i, item in enumerate(value))


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor; an ``Inert`` may stand for a sparse or quantized one."""
    calls = ("torch._utils._rebuild", "torch.nn.parameter.", "torch._tensor._rebuild")
    return isinstance(value, StoredTensor) or (
        isinstance(value, Inert) and value.name.startswith(calls)
    )


def _unread_tensor(value: Any, budget: Budget) -> Inert | None:
    """Return a tensor that is not dense: the value, or an item of it, as in quantized layers."""
    items = [value, *(value if type(value) in (list, tuple) else ())]
    budget.spend(len(items))
    return next((x for x in items if isinstance(x, Inert) and _is_tensor(x)), None)


def _is_module(value: Any) -> bool:
    """Return whether a value is a pickled nn.Module of any class."""
    fields = value.state if isinstance(value, Inert) else None
    return isinstance(fields, dict) and isinstance(fields.get("_modules"), dict)


def _holds_weights(value: Any, budget: Budget) -> bool:
    """Return whether a value is a module, or a container of tensors."""
    items: Any = value if type(value) in (list, tuple) else ()
    if isinstance(value, dict):
        items = value.values()
    budget.spend(len(items))  # a file may repeat one container under many names
    return _is_module(value) or any(map(_is_tensor, items))


def _is_state(value: Any, budget: Budget) -> bool:
    """Return whether a value is a module or a state_dict: tensors, and no nested dicts."""
    if not isinstance(value, dict):
        return _is_module(value)
    return _holds_weights(value, budget) and not any(
        isinstance(item, dict) and not name.endswith("_extra_state") for name, item in _items(value)
    )


def _state(value: Any, budget: Budget) -> dict[str, Any]:
    """Return a value's tensors and other entries by their names."""
    if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
        raise CheckpointError("the state_dict has keys that are not text. Save it with text keys")
    state = _module_state(value, budget) if isinstance(value, Inert) else dict(_items(value))
    num_parts = sum(name.count(".") for name in state)
    budget.spend(Budget.NAME * len(state) + Budget.PART * num_parts)
    return state


def _module_state(root: Inert, budget: Budget) -> dict[str, Any]:
    """Return the state_dict of a pickled module, without its class."""
    state: dict[str, Any] = {}
    todo = [("", root)]
    while todo:
        prefix, module = todo.pop()
        fields: dict[str, Any] = module.state if isinstance(module.state, dict) else {}
        budget.spend(len(fields))
        for name, value in fields.items():
            if isinstance(value, Inert) and value.name == "torch.ScriptObject":
                raise CheckpointError(
                    f"{prefix}{name} is not a dense tensor ({module.name}, quantized); save the "
                    "weights from before the network was quantized"
                )
        parameters, buffers, children, hidden = (
            fields.get(kind) or {}
            for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
        )
        # A damaged file's modules may contain each other, or one child under many names.
        num_names = 1 + sum(map(len, (parameters, buffers, children, hidden)))
        budget.spend(num_names * (Budget.NAME + len(prefix)))
        hidden = {name for name in hidden if isinstance(name, str)}
        values = parameters | {n: value for n, value in buffers.items() if n not in hidden}
        state |= {f"{prefix}{n}": value for n, value in values.items() if value is not None}
        modules = [(f"{prefix}{n}.", m) for n, m in children.items() if isinstance(m, Inert)]
        todo += reversed(modules)
    return state


def _bare_names(value: Any, budget: Budget) -> set[str]:
    """Return the names of a value's tensors, without wrappers."""
    names = [name for name, item in _state(value, budget).items() if _is_tensor(item)]
    return {*rename(names, "auto", False, True)[0].values()}


def rename(
    names: Iterable[str], prefix: str, is_lightning: bool, ema: bool
) -> tuple[dict[str, str], list[str]]:
    """Return the new name of each chosen weight, and notes on decisions by names alone.

    Args:
        names: the weights' names in the file.
        prefix: the network's submodule. "auto" removes wrappers, and finds the network.
        is_lightning: whether the names begin at a LightningModule.
        ema: whether "auto" prefers an average of a LightningModule's network.

    Raises:
        CheckpointError: no name has the prefix, or two names would become one.
    """
    notes: list[str] = []
    paths: dict[str, NameParts] = {}
    for name in names:
        *modules, leaf = name.split(".")
        paths[name] = (*(part for part in modules if part not in WRAPPERS), leaf)
    is_unclear, network = False, tuple(part for part in prefix.split(".") if part)
    if prefix == "auto":
        paths, is_unclear = _without_module(paths)
        network, notes = _network(paths.values(), ema) if is_lightning else ((), [])
    if is_unclear:
        option = f"--prefix {'.'.join(network)!r} keeps it as a child of the network"
        notes = [f"removed `module` as a wrapper (DataParallel, DDP); {option}", *notes]
    depth, old_names = len(network), dict[str, str]()
    for name, path in paths.items():
        if path[:depth] == network and path[depth:]:
            new = ".".join(path[depth:])
            if old_names.setdefault(new, name) != name:
                raise CheckpointError(f"{old_names[new]} and {name} would both become {new}")
    if not old_names:
        beginnings = ", ".join(
            islice(dict.fromkeys(path[0] for path in paths.values()), _MAX_SHOWN)
        )
        raise CheckpointError(f"no tensor is named {prefix}.*. The names begin with {beginnings}")
    return {name: new for new, name in old_names.items()}, notes


def _without_module(paths: dict[str, NameParts]) -> tuple[dict[str, NameParts], bool]:
    """Remove each `module` that is a wrapper. Also return whether only its name shows it."""
    children: defaultdict[NameParts, set[str]] = defaultdict(set)
    for path in paths.values():
        for depth, part in enumerate(path):
            children[path[:depth]].add(part)
    wrapped = {
        parent: names
        for parent, names in children.items()
        if names <= {"module", "n_averaged"} and (*parent, "module") in children
    }
    stripped = {
        name: tuple(part for depth, part in enumerate(path) if path[:depth] not in wrapped)
        for name, path in paths.items()
        if path[-1] != "n_averaged" or path[:-1] not in wrapped  # the counter is no weight
    }
    return stripped, {"module"} in wrapped.values()


def _network(paths: Iterable[NameParts], ema: bool) -> tuple[NameParts, list[str]]:
    """Return the names that lead to a LightningModule's network or its average, and notes."""
    children: defaultdict[str, set[NameParts]] = defaultdict(set)
    for path in paths:
        children[path[0]].add(path[1:])
    network = next((name for name in NETWORKS if name in children), None)
    if network is None or () in children[network]:
        return (), []
    for name, inside in children.items() if ema else ():
        if _AVERAGE.search(name) and inside == children[network]:
            return (name,), [f"{name} is the average of {network}; --no-ema chooses {network}"]
    return (network,), []
