"""Name the weights as the bare network does: wrappers stripped, then the network's own prefix."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .tensors import CheckpointError

NETWORKS = ("net", "model", "network")  # what a LightningModule usually calls its network
# Names that only wrappers use: torch.compile, FSDP, activation checkpointing, Fabric.
_PRIVATE = frozenset(
    ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
)
_MAX_DEPTH = 100  # segments of a name; the work grows with their square
_AVERAGE = re.compile(r"(^|_)(ema|swa|average|averaged|avg)(_|$)")
Path = tuple[str, ...]


class Wrappers:
    """The wrappers of a set of names.

    `_orig_mod` and its like are wrappers anywhere. `module` (DataParallel, DDP) is one where it is
    the only child of its parent, because a wrapper has no other; `n_averaged` beside it is
    AveragedModel's counter and goes with it. Where `known` names the network's own keys, a
    `module` in them stays.

    Attributes:
        paths: of each name without its wrappers; a counter has none.
    """

    def __init__(
        self, names: Iterable[str], keep_module: bool = False, known: Collection[str] = ()
    ) -> None:
        split = {name: name.split(".", _MAX_DEPTH) for name in names}
        if any(len(parts) > _MAX_DEPTH for parts in split.values()):
            raise CheckpointError(f"damaged: it holds names of more than {_MAX_DEPTH} parts")
        public = {name: (*_public(parts[:-1]), parts[-1]) for name, parts in split.items()}
        self._modules: set[Path] = set()  # the paths of those that are wrappers
        if not keep_module:
            self._find_modules(set(public.values()), known)
        self.paths = {
            name: self._without_modules(path)
            for name, path in public.items()
            if path[-1] != "n_averaged" or (*path[:-1], "module") not in self._modules
        }

    def _find_modules(self, paths: set[Path], known: Collection[str]) -> None:
        children: defaultdict[Path, set[str]] = defaultdict(set)
        inside: defaultdict[Path, list[Path]] = defaultdict(list)
        for path in paths:
            for i, part in enumerate(path):
                children[path[:i]].add(part)
                if part == "module":
                    inside[path[: i + 1]].append(path)
        # From the outermost on: whether a name is known is asked without the wrappers around it.
        for module in sorted(inside, key=len):
            is_alone = children[module[:-1]] <= {"module", "n_averaged"} and module not in paths
            names = (".".join(self._without_modules(path)) for path in inside[module])
            if is_alone and not all(name in known for name in names):
                self._modules.add(module)

    def _without_modules(self, path: Path) -> Path:
        return tuple(
            part
            for i, part in enumerate(path)
            if part != "module" or path[: i + 1] not in self._modules
        )

    def strip(self, module: str) -> Path:
        """Return the path of a module, not of a tensor, without its wrappers."""
        return self._without_modules(_public(module.split("."))) if module else ()


def _public(parts: Iterable[str]) -> Path:
    return tuple(part for part in parts if part not in _PRIVATE)


def bare_names(names: Iterable[str]) -> set[str]:
    """Return the names without wrappers and their counters, to compare two sets of them."""
    return {".".join(path) for path in Wrappers(names).paths.values()}


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
        paths = self._wrappers.paths
        if prefix == "auto":
            self.prefix = _auto_prefix(paths.values(), ema) if is_lightning else ()
        else:
            self.prefix = self._wrappers.strip(prefix.rstrip("."))
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
            path = self._below_prefix(self._wrappers.strip(name))
            if path is not None:
                numbers = {str(k): v for k, v in entries.items() if type(v) is int}
                renamed[".".join(path)] = numbers
        return renamed


def _auto_prefix(paths: Collection[Path], ema: bool) -> Path:
    groups: defaultdict[str, set[Path]] = defaultdict(set)
    for path in paths:
        groups[path[0]].add(path[1:])
    network = next((name for name in NETWORKS if name in groups), None)
    if network is None and len(groups) == 1:
        network = next(iter(groups))
    if network is None or () in groups[network]:
        return ()
    for name, names in groups.items():
        if ema and _AVERAGE.search(name) and names == groups[network]:
            return (name,)
    return (network,)
