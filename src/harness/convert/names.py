"""Name the weights as the bare network does: wrappers stripped, then the network's own prefix."""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from .sources import quoted
from .tensors import CheckpointError

NETWORKS = ("net", "model", "network")  # what a LightningModule usually calls its network
# Names that averaged weights have: ema, model_ema, EMACallback, shadow_params; Adam's exp_avg not.
_AVERAGE = re.compile(
    r"(?<![A-Za-z])(?<!exp_)(ema|swa|avg|averaged?|shadow)(?![a-z])"
    r"|(?<![A-Z])(EMA|SWA|Ema|Swa|Averag(e|ed|ing))(?![a-z])"
)
_COPY = re.compile(r"(?<![a-z])(teacher|target|momentum|mean)(?![a-z])")  # others, perhaps
# Names that only wrappers use: torch.compile, FSDP, activation checkpointing, Fabric.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_MAX_DEPTH = 100  # segments of a name
_MAX_NOTES = 3
_NO_ACCIDENT = 3  # names
Path = list[str]  # the segments of a name
MarkedPath = list[str | None]  # with None for a wrapper, and for a tensor that is a wrapper's
Groups = dict[str, set[tuple[str, ...]]]  # by the name of a module what is in it


class Names:
    """The new name of each weight, in `new`; what is not in it is left out.

    `_orig_mod` and its like are wrappers anywhere. `module` (DataParallel, DDP) is one where it is
    the only child of its parent, because a wrapper has no other; `n_averaged` beside it is
    AveragedModel's counter and goes with it. `notes` say what was decided by names alone, and the
    option that decides otherwise.

    Args:
        prefix: the network's place, or "auto": in a LightningModule `net`, `model`, `network` or
            its only child; otherwise the whole.
        is_lightning: whether the names begin at a LightningModule.
        known: the network's own names, prefix included; a `module` in them stays.
        versions: the `_metadata` of a state_dict; its whole numbers become `metadata`, by the new
            names. A wrapper's entry gives way to that of its module.

    Raises:
        CheckpointError: nothing has that prefix, or two names would become one.
    """

    def __init__(
        self,
        names: Iterable[str],
        prefix: str = "auto",
        is_lightning: bool = False,
        keep_module: bool = False,
        known: Collection[str] = (),
        ema: bool = True,
        versions: Mapping[Any, Any] | None = None,
    ) -> None:
        self.notes: list[str] = []
        paths = {name: _parts(name) for name in names}
        # Each path as it was beside what becomes of it; modules are looked up among them.
        self._tensors = sorted((list(path), path) for path in paths.values())
        if not keep_module and _strip(_strip_as(known, paths.values())) and not known:
            self.notes.append(
                "`module` was taken for a wrapper (DataParallel, DDP); "
                "--keep-module if the network itself has a child of that name"
            )
        self._prefix = self._module("" if prefix == "auto" else prefix.rstrip("."))
        stripped = [_stripped(path) for path in paths.values() if path[-1] is not None]
        if prefix == "auto":
            if is_lightning:
                self._find_network(stripped, ema)
            self._say_copies(stripped)
        owners: dict[str, str] = {}
        for name, path in paths.items():
            if path[-1] is None or not (new := self._below_prefix(_stripped(path))):
                continue
            if owners.setdefault(new, name) != name:
                raise CheckpointError(f"{owners[new]} and {name} would both become {new}")
        self.new = {name: new for new, name in owners.items()}
        if not self.new:
            raise CheckpointError(_nothing(prefix, stripped))
        self.metadata: dict[str, Any] = {}
        for name, entries in (versions or {}).items():
            if isinstance(name, str) and isinstance(entries, dict):
                module = self._below_prefix(self._module(name))
                if module is not None:
                    numbers = {str(k): v for k, v in entries.items() if type(v) is int}
                    self.metadata[module] = numbers

    def _module(self, name: str) -> Path:
        """Return the path of a module without wrappers: the beginning of those of its tensors."""
        raw = _parts(f"{name}.")[:-1] if name else []
        first = bisect_left(self._tensors, (raw,))
        before, after = self._tensors[first] if first < len(self._tensors) else ([], [])
        return _stripped(after[: len(raw)] if before[: len(raw)] == raw else raw)

    def _below_prefix(self, path: Path) -> str | None:
        depth = len(self._prefix)
        return ".".join(path[depth:]) if path[:depth] == self._prefix else None

    def _find_network(self, paths: Collection[Path], ema: bool) -> None:
        """Set the prefix to that of a LightningModule's network, or of its average."""
        groups = _groups(paths)
        network = next((name for name in NETWORKS if name in groups), None)
        if network is None and len(groups) == 1:
            network = next(iter(groups))
        if network is None or () in groups[network]:
            deep = [name for name, inside in groups.items() if () not in inside]
            if network is None and len(deep) == 1:
                others = ", ".join(sorted(groups.keys() - set(deep))[:_MAX_NOTES])
                self.notes.append(
                    f"all but {others} lie below {deep[0]}; --prefix {quoted(deep[0])} takes that "
                    "network alone"
                )
            return
        wanted = groups.pop(network)
        self._prefix = [network]
        for name, inside in groups.items() if ema else ():
            if self._prefix == [network] and is_average(name) and inside == wanted:
                self._prefix = [name]
                # First, as what was taken must be said however many copies there are.
                said = f"{name} is the average of {network}; --no-ema takes {network}"
                self.notes.insert(0, said)
            elif inside == wanted or (_may_be_copy(name) and 3 * len(inside) >= len(wanted)):
                kind = "a copy" if inside == wanted else "an average"
                names = "" if inside == wanted else "but has other names, "
                self.notes.append(
                    f"{name} may be {kind} of {network}, {names}and is left out; "
                    f"--prefix {quoted(name)} takes it"
                )
        del self.notes[_MAX_NOTES:]

    def _say_copies(self, paths: Collection[Path]) -> None:
        """Add a note for what is taken, and may be a copy of something else that is."""
        place = [*self._prefix]
        paths = [path[len(place) :] for path in paths if path[: len(place)] == place]
        while len(groups := _groups(paths)) == 1:
            place += groups
            paths = [path[1:] for path in paths]
        for name in [*filter(_may_be_copy, groups)][:_MAX_NOTES]:
            rest = {tuple(path) for path in paths if path and path[0] != name}
            others = {key: inside for key, inside in groups.items() if key != name}
            same = [key for key, inside in others.items() if _are_alike(groups[name], inside)]
            if same or _are_alike(groups[name], rest):
                of = ".".join([*place, same[0]]) if same else "the rest"
                copy = ".".join([*place, name])
                self.notes.append(
                    f"{copy} may be a copy of {of} (an average, a teacher), and both are taken; "
                    f"--prefix {quoted(copy)} takes it alone"
                )


def is_average(name: str) -> bool:
    """Whether averaged weights are usually called so."""
    return bool(_AVERAGE.search(name))


def _may_be_copy(name: str) -> bool:
    return bool(_AVERAGE.search(name) or _COPY.search(name))


def _groups(paths: Iterable[Path]) -> Groups:
    groups: Groups = defaultdict(set)
    for path in paths:
        if path:
            groups[path[0]].add(tuple(path[1:]))
    return groups


def _are_alike(inside: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> bool:
    """Whether two modules have the same names, or so many that it is no accident."""
    return () not in inside and (inside == other or len(inside & other) >= _NO_ACCIDENT)


def _parts(name: str) -> MarkedPath:
    """Return the path of a tensor without the wrappers that are known by their names."""
    *modules, leaf = name.split(".", _MAX_DEPTH)
    if len(modules) == _MAX_DEPTH:
        raise CheckpointError(f"damaged: it holds names of more than {_MAX_DEPTH} parts")
    return [*(part for part in modules if part not in WRAPPERS), leaf]


def _stripped(path: MarkedPath) -> Path:
    return [part for part in path if part is not None]


def _strip_as(known: Iterable[str], paths: Iterable[MarkedPath]) -> list[MarkedPath]:
    """Put None for what the network's own names have not, and return the paths not among them."""
    own: defaultdict[tuple[str | None, ...], list[list[str]]] = defaultdict(list)
    for name in known:
        segments = name.split(".")
        own[_without_modules(segments)].append(segments)
    others: list[MarkedPath] = []
    for path in paths:
        candidates, marked = own.get(_without_modules(path), []), list[str | None]()
        wanted = candidates[0][::-1] if len(candidates) == 1 else []
        # The network's own `module` is inside of a wrapper's.
        for part in reversed(path):
            is_own = bool(wanted) and part == wanted[0]
            marked.append(part if is_own else None)
            wanted = wanted[is_own:]
        if candidates[1:] or not candidates or wanted:
            others.append(path)
        else:
            path[:] = marked[::-1]
    return others


def _without_modules(path: Sequence[str | None]) -> tuple[str | None, ...]:
    return *(part for part in path[:-1] if part != "module"), path[-1]


def _strip(paths: list[MarkedPath]) -> bool:
    """Put None for each `module` that is a wrapper, and for the counter beside it.

    Returns whether there was a wrapper that nothing but its name tells.
    """
    is_guess = False
    todo = [(0, paths)]
    while todo:
        depth, paths = todo.pop()
        inner = [path for path in paths if len(path) > depth + 1 or path[depth] != "n_averaged"]
        if inner and all(path[depth] == "module" and len(path) > depth + 1 for path in inner):
            is_guess |= len(inner) == len(paths)
            for path in paths:
                path[depth] = None
            todo.append((depth + 1, inner))
            continue
        below: defaultdict[str | None, list[MarkedPath]] = defaultdict(list)
        for path in paths:
            if len(path) > depth + 1:
                below[path[depth]].append(path)
        for group in below.values():
            if any("module" in path[depth + 1 :] for path in group):
                todo.append((depth + 1, group))
    return is_guess


def _nothing(prefix: str, paths: Collection[Path]) -> str:
    """Say that nothing has the prefix, and where there is something like it."""
    groups = ", ".join(sorted({path[0] for path in paths if path})[:20])
    if prefix == "auto":
        return f"no tensor has a name; there is: {groups}"
    prefix = prefix.rstrip(".")
    wanted = f".{prefix}."
    places = (f".{'.'.join(path)}".partition(wanted) for path in paths)
    deeper = min((before for before, found, _ in places if found), key=len, default="")
    hint = f"there is: {groups}"
    if deeper:
        hint = f"--prefix {quoted((deeper + wanted).strip('.'))} is there"
    return f"nothing is called {prefix}.*; {hint}"
