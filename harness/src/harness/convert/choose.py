"""Find the weights in what was saved: a state_dict, one inside a checkpoint, a pickled module."""

import re
from dataclasses import dataclass
from typing import Any

from .names import Names, is_average
from .places import (
    Place,
    at,
    describe,
    is_lightning_module,
    is_module,
    is_odd_tensor,
    is_tensor,
    is_weights,
    items,
    key_for,
    lookup,
    module_state,
    places_of,
)
from .sources import quoted
from .tensors import Budget, CheckpointError, Tensor, parsing
from .unpickle import Inert

_KEYS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network")
# What training keeps beside a network, and what holds its own tensors.
_TRAINING = re.compile(r"optim|sched|scaler|rng|callbacks|loops|criterion|hyper_|hparams|config")
WHOLE = "the whole file"
_MAX_SHOWN = 20  # entries, in a message


@dataclass
class Chosen:
    """The weights, as they are named in the file."""

    state: dict[str, Any]  # names and values, in order; not only Tensors
    key: str  # where they were, in words
    place: Place  # the keys that lead there
    is_lightning: bool  # the names begin at a LightningModule, of which the network is a part
    is_exact: bool  # wrappers are already stripped, because their classes were known
    rest: list[str]  # the file's other entries
    notes: list[str]  # other weights that the file holds, and how to take them


@parsing("what it holds")
def choose(root: Any, key: str | None, ema: bool, budget: Budget) -> Chosen:
    """Take the entry `key` (dotted where nested, "" for the whole), or what is usually weights.

    With `ema`, averaged weights are preferred.

    Raises:
        CheckpointError: nothing there is weights without doubt; the message lists what there is.
    """
    if isinstance(root, Tensor):
        size = f"of shape {root.shape} and type {root.dtype}"
        raise CheckpointError(f"a bare tensor {size}, not a network's weights")
    entries = dict(items(root))
    if "ds_version" in entries and key is None:
        raise CheckpointError("a part of a DeepSpeed checkpoint; run its zero_to_fp32.py first")
    notes: list[str] = []
    place = _usual(root, ema, notes, budget) if key is None else lookup(root, key)
    value = root if place is None else at(root, place)
    if place is None or not is_weights(value):
        raise CheckpointError(_refusal(root, key))
    name, state = ".".join(place) or WHOLE, _state(value, budget)
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise CheckpointError(f"{name} holds names that are not text")
    budget.spend_names(state)
    if is_pickled := is_module(value):
        is_lightning = is_lightning_module(value)
    else:
        # An average may be that of the network alone.
        main = dict(items(entries.get("state_dict", entries.get("model"))))
        is_inside = not main or any(name in main for name in state)
        is_lightning = "pytorch-lightning_version" in entries and place != () and is_inside
    rest = [
        ".".join((*place[:depth], other))
        for depth in range(len(place))
        for other, _ in items(at(root, place[:depth]))
        if other != place[depth]
    ]
    state = {name: value for name, value in state.items() if value is not None}
    return Chosen(state, name, place, is_lightning, is_pickled, rest, notes)


def _usual(root: Any, ema: bool, notes: list[str], budget: Budget) -> Place | None:
    """Return the place of the weights, where there is no doubt; say what else could be meant."""
    entries = dict(items(root))
    if entries.keys() >= {"current_model_state", "state_dict"}:
        # Lightning's WeightAveraging.
        if ema:
            notes.append("state_dict is the average; --no-ema takes current_model_state")
        return ("state_dict",) if ema else ("current_model_state",)
    places = places_of(root)
    averages = {p: v for p, v in places.items() if any(map(is_average, p))}
    others = {p: v for p, v in places.items() if p not in averages}
    raw = _raw(others)
    if raw is None:
        is_only = ema and all(place and _TRAINING.search(place[0]) for place in others)
        return next((p for p, v in averages.items() if is_only and _is_state(v)), None)
    if raw == () or not ema or not averages:
        return raw
    names, chosen = set(_tensor_names(places[raw], budget)), raw
    for place, value in list(averages.items())[:_MAX_SHOWN]:
        average, what = set(_tensor_names(value, budget)), ".".join(place)
        if chosen == raw and average == names and not _TRAINING.search(place[0]):
            # An average of the parameters alone, or what holds the average, is not the weights.
            chosen = place
            notes.append(f"{what} is the average of {'.'.join(raw)}; --no-ema takes that")
        elif 3 * len(average) >= len(names):
            notes.append(
                f"{what} may be an average, and is left out; --key {quoted(what)} takes it"
            )
    return chosen


def _raw(places: dict[Place, Any]) -> Place | None:
    """Return the place of weights with a usual name, or of the only ones."""
    for name in _KEYS:
        if _is_state(places.get((name,))):
            return (name,)
    own = [place for place in places if not (place and _TRAINING.search(place[0]))]
    # Others that lie beside it, or deeper in it, would be lost.
    if not own or any(place[: len(own[0])] != own[0] for place in own) or len(own[0]) > 1:
        return None
    place, value = own[0], places[own[0]]
    is_all = (
        place == () and isinstance(value, dict) and all(is_tensor(item) for _, item in items(value))
    )
    return place if is_all or _is_state(value, is_guess=True) else None


def _refusal(root: Any, key: str | None) -> str:
    """Say that there are no weights, what there is, and what could be meant."""
    where = f"at --key {quoted(key)}" if key is not None else "in a usual place"
    inside = ", ".join(f"{name} ({describe(v)})" for name, v in [*items(root)][:_MAX_SHOWN])
    places = places_of(root)
    parents = {place[:depth] for place in places for depth in range(len(place))}
    whole = [(place, value) for place, value in places.items() if place not in parents]
    options = [f"{option} ({describe(v)})" for p, v in whole[:5] if (option := key_for(p, v))]
    hint = f"take one with {' or '.join(options)}" if options else ""
    return "; ".join(filter(None, [f"no weights {where}", hint, f"it holds: {inside}"]))


def _is_state(value: Any, is_guess: bool = False) -> bool:
    """Whether weights are a state_dict: a few tensors beside a config, or in a list, are not.

    With `is_guess`, because nothing is called as weights usually are, one must have dimensions and
    not be of bytes: a few statistics have none, the states of random generators are bytes.
    """
    if not isinstance(value, dict | Inert) or is_odd_tensor(value):
        return False
    if is_module(value):
        return True
    tensors = 0
    for name, item in items(value):
        if is_tensor(item):
            is_sure = not isinstance(item, Tensor) or (item.shape and item.dtype != "uint8")
            tensors += bool(is_sure or not is_guess)
        elif isinstance(item, dict | Inert) and not name.endswith("_extra_state"):
            return False
    return tensors > 0


def _state(weights: Any, budget: Budget) -> dict[str, Any]:
    return module_state(weights, budget) if is_module(weights) else dict(items(weights))


def _tensor_names(weights: Any, budget: Budget) -> list[str]:
    """Return the names of the tensors without wrappers; of what cannot be named, none."""
    try:
        state = _state(weights, budget)
        budget.spend_names(state)
        names = [name for name, value in state.items() if is_tensor(value)]
        return [*Names(names, prefix="").new.values()]
    except CheckpointError:
        return []
