"""Hold the tensors of a file against those of a module: which fit where, and which do not."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from harness.convert.tensors import Tensor as Stored
from harness.errors import UserError
from harness.init.parts import bare, check_parts, places, tops, typed
from harness.init.settings import AUTO, Init
from harness.names import did_you_mean, few, is_below


@dataclass
class Fit:
    """What of a file's weights fits a module, by the module's names.

    Attributes:
        into: the part of the module that takes them.
        taken: by the module's names those of the file.
        misshaped: what has another shape or kind, with both in words.
        missing: what the file does not have.
        unexpected: what the module does not have, by the names that it would have there.
        left_out: what was to be left out.
        cast: how many tensors change from which type to which.
    """

    into: str
    taken: dict[str, str] = field(default_factory=dict)
    misshaped: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    cast: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def place(self) -> str:
        """The part that takes them, in words."""
        return self.into or "the whole module"

    @property
    def rest(self) -> list[str]:
        """What does not fit, of either side."""
        return [*self.misshaped, *self.missing, *self.unexpected]


def tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a checkpoint holds, by their bare names."""
    # A state_dict has each name of what is shared, and other state besides.
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    state = module.state_dict(keep_vars=True)
    return {bare(name): value for name, value in state.items() if id(value) in known}


def fitted(stored: Mapping[str, Stored], own: Mapping[str, Tensor], init: Init) -> Fit:
    """Hold a file's tensors against a module's.

    Raises:
        UserError: if a setting names what is not there.
    """
    names = renamed(stored, init.map)
    theirs = {new: stored[old] for new, old in names.items()}
    into = init.into
    if into == AUTO:
        into = place_for(theirs, own)
    elif into:
        check_parts(f"init.into={into}", [into], own)
    start = f"{into}." if into else ""
    there = {f"{start}{name}": (names[name], tensor) for name, tensor in theirs.items()}
    check_parts(f"init.leave_out={typed(init.leave_out)}", init.leave_out, [*own, *there])
    fit = Fit(into)
    part = {name: value for name, value in own.items() if is_below(name, [into])}
    for name, value in part.items():
        if is_below(name, init.leave_out):
            fit.left_out.append(name)
        elif name not in there:
            fit.missing.append(name)
        elif what := difference(there[name][1], value):
            fit.misshaped[name] = what
        else:
            fit.taken[name], tensor = there[name]
            if (before := tensor.dtype) != (now := str(value.dtype).removeprefix("torch.")):
                fit.cast[before, now] += 1
    others = [name for name in there if name not in part]
    fit.left_out += [name for name in others if is_below(name, init.leave_out)]
    fit.unexpected = [name for name in others if not is_below(name, init.leave_out)]
    # Tied weights are there under one of their names; BatchNorm counts since torch 0.4.1.
    has_value = {id(own[name]) for name in fit.taken}
    fit.missing = [
        name
        for name in fit.missing
        if id(own[name]) not in has_value and not name.endswith(".num_batches_tracked")
    ]
    return fit


def renamed(names: Iterable[str], given: Mapping[str, str]) -> dict[str, str]:
    """The file's names by what they are called here.

    Raises:
        UserError: if a beginning is none of theirs, or two would have one name.
    """
    names, typed = list(names), f"init.map={typed_map(given)}"
    known = places(names)
    for old in given:
        if old and old not in known:
            near = did_you_mean(old, known) or f" The file has {few(tops(known))}."
            raise UserError(f"{typed}: nothing in the file is called {old}.{near}")
    found: dict[str, str] = {}
    for name in names:
        fitting = [old for old in given if is_below(name, [old])]
        old = max(fitting, key=len, default="")
        new = with_beginning(name, old, given[old]) if fitting else name
        if found.setdefault(new, name) != name:
            raise UserError(f"{typed}: {found[new]} and {name} would both be {new}.")
    return found


def with_beginning(name: str, old: str, new: str) -> str:
    """The name with another beginning, of whole parts; an empty one strips or adds."""
    return ".".join(filter(None, (new, name[len(old) :].lstrip("."))))


def place_for(theirs: Mapping[str, Stored], own: Mapping[str, Tensor]) -> str:
    """The part of the module that most tensors fit, of equal ones the outermost."""
    for by_shape in (True, False):
        votes: Counter[str] = Counter()
        for name, value in own.items():
            pieces = name.split(".")
            for depth in range(len(pieces)):
                tensor = theirs.get(".".join(pieces[depth:]))
                if tensor and not (by_shape and difference(tensor, value)):
                    votes[".".join(pieces[:depth])] += 1
        if votes:
            most = max(votes.values())
            best = [place for place, num in votes.items() if num == most]
            return min(best, key=lambda place: place.count(".") + bool(place))
    return ""


def difference(stored: Stored, own: Tensor) -> str:
    """What keeps a file's tensor from being one of the module's; empty if nothing does."""
    if is_lazy(own):
        return ""  # takes any shape
    if tuple(stored.shape) != tuple(own.shape):
        return f"{tuple(stored.shape)}, here {tuple(own.shape)}"
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if (dtype.is_floating_point, dtype.is_complex) != (own.is_floating_point(), own.is_complex()):
        return f"{stored.dtype}, here {str(own.dtype).removeprefix('torch.')}"
    return ""


def typed_map(given: Mapping[str, str]) -> str:
    """A renaming as it is typed."""
    return "{" + ",".join(f"{old}:{new}" for old, new in given.items()) + "}"
