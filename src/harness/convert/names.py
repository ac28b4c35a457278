"""Name the weights as the bare network does: wrappers stripped, then the network's own prefix."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .tensors import CheckpointError

# Names that only wrappers use: torch.compile, FSDP, activation checkpointing, Fabric.
_PRIVATE = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
)
_MAX_DEPTH = 100  # segments of a name; the work grows with their square
_NETWORKS = ("net", "model", "network")  # what a LightningModule usually calls its network
_AVERAGE = re.compile(r"(^|_)(ema|swa|average|averaged|avg)(_|$)")
Path = tuple[str, ...]


class Wrappers:
    """The wrappers of a set of names.

    `_orig_mod` and its like are wrappers anywhere. `module` (DataParallel, DDP) is one where it is
    the only child of its parent, because a wrapper has no other; `n_averaged` beside it is
    AveragedModel's counter and goes with it. Where `known` names the network's own keys, a
    `module` in them stays.
    """

    def __init__(self, names: Iterable[str], keep_module: bool, known: Collection[str]) -> None:
        self._passes: list[set[Path]] = []
        names = list(names)
        if any(name.count(".") >= _MAX_DEPTH for name in names):
            raise CheckpointError(f"damaged: it holds names of more than {_MAX_DEPTH} parts")
        paths = {self.strip(tuple(name.split(".")), is_tensor=True) for name in names}
        while not keep_module and (parents := _module_parents(paths, known)):
            self._passes.append(parents)
            paths = {_without_module(path, parents) for path in paths}

    def strip(self, path: Path, is_tensor: bool) -> Path:
        """Return the path of a tensor, or of a module, without its wrappers."""
        last = len(path) - 1 if is_tensor else len(path)
        path = tuple(part for i, part in enumerate(path) if i == last or part not in _PRIVATE)
        for parents in self._passes:
            path = _without_module(path, parents)
        return path

    def is_counter(self, path: Path) -> bool:
        """Whether a stripped path is the `n_averaged` of a wrapper that is gone."""
        return path[-1] == "n_averaged" and any(path[:-1] in parents for parents in self._passes)


def _module_parents(paths: Collection[Path], known: Collection[str]) -> set[Path]:
    children: defaultdict[Path, set[str]] = defaultdict(set)
    below: defaultdict[Path, list[str]] = defaultdict(list)
    for path in paths:
        for i, part in enumerate(path):
            children[path[:i]].add(part)
            if part == "module":
                below[path[:i]].append(".".join(path))
    return {
        parent
        for parent, names in below.items()
        if children[parent] <= {"module", "n_averaged"}
        and (*parent, "module") not in paths
        and not all(name in known for name in names)
    }


def _without_module(path: Path, parents: set[Path]) -> Path:
    for i, part in enumerate(path):
        if part == "module" and path[:i] in parents:
            return path[:i] + path[i + 1 :]
    return path


def bare_names(names: Iterable[str]) -> set[str]:
    """Return the names without wrappers and their counters, to compare two sets of them."""
    names = list(names)
    wrappers = Wrappers(names, keep_module=False, known=())
    paths = (wrappers.strip(tuple(name.split(".")), is_tensor=True) for name in names)
    return {".".join(path) for path in paths if not wrappers.is_counter(path)}


class Names:
    """The new name of each weight, and what is left out.

    Args:
        names: as in the file.
        prefix: the network's place, or "auto": in a LightningModule `net`, `model`, `network` or
            its only child; otherwise the whole.
        is_lightning: whether the names begin at a LightningModule.
        keep_module: leave all `module` segments alone.
        known: the network's own names, prefix included, where they are known.
        ema: as for `choose`.

    Raises:
        CheckpointError: nothing has that prefix, or two names would become one.
    """

    def __init__(
        self,
        names: Collection[str],
        prefix: str = "auto",
        is_lightning: bool = False,
        keep_module: bool = False,
        known: Collection[str] = (),
        ema: bool = True,
    ) -> None:
        self._wrappers = Wrappers(names, keep_module, known)
        paths = {name: self._wrappers.strip(tuple(name.split(".")), True) for name in names}
        paths = {n: path for n, path in paths.items() if not self._wrappers.is_counter(path)}
        self.prefix = _auto_prefix(paths.values(), ema) if prefix == "auto" and is_lightning else ()
        if prefix not in ("auto", ""):
            self.prefix = self._wrappers.strip(tuple(prefix.rstrip(".").split(".")), False)
        self.new: dict[str, str] = {}
        owners: dict[str, str] = {}
        for name, path in paths.items():
            if (short := self._below_prefix(path)) and (new := ".".join(short)):
                if new in owners:
                    raise CheckpointError(f"{owners[new]} and {name} would both become {new}")
                self.new[name], owners[new] = new, name
        if not self.new:
            groups = ", ".join(sorted({path[0] for path in paths.values()})[:20])
            wanted = "no tensor has a name" if prefix == "auto" else f"nothing is called {prefix}.*"
            raise CheckpointError(f"{wanted}; there is: {groups}")

    def _below_prefix(self, path: Path) -> Path | None:
        depth = len(self.prefix)
        return path[depth:] if path[:depth] == self.prefix else None

    def metadata(self, metadata: Mapping[Any, Any]) -> dict[str, Any]:
        """Rename the modules of a state_dict's `_metadata`; a wrapper's entry gives way.

        Only whole numbers are kept (a module's version is one).
        """
        renamed: dict[str, Any] = {}
        for name, entries in metadata.items():
            is_name = isinstance(name, str) and name.count(".") < _MAX_DEPTH
            if not is_name or not isinstance(entries, dict):
                continue
            stripped = self._wrappers.strip(tuple(name.split(".")) if name else (), False)
            path = self._below_prefix(stripped)
            if path is not None:
                numbers = {str(k): v for k, v in entries.items() if type(v) is int}
                renamed[".".join(path)] = numbers
        return renamed


def _auto_prefix(paths: Collection[Path], ema: bool) -> Path:
    groups: defaultdict[str, set[Path]] = defaultdict(set)
    for path in paths:
        groups[path[0]].add(path[1:])
    network = next((name for name in _NETWORKS if name in groups), None)
    if network is None and len(groups) == 1:
        network = next(iter(groups))
    if network is None or () in groups[network]:
        return ()
    for name, names in groups.items():
        if ema and _AVERAGE.search(name) and names == groups[network]:
            return (name,)
    return (network,)
