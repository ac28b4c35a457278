"""Name the weights as the bare network does: wrappers stripped, then the network's own prefix."""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from .tensors import CheckpointError

NETWORKS = ("net", "model", "network")  # what a LightningModule usually calls its network
# Names that only wrappers use: torch.compile, FSDP, activation checkpointing, Fabric.
_PRIVATE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_MAX_DEPTH = 100  # segments of a name; the work grows with their square
_AVERAGE = re.compile(r"(^|_)(ema|swa|average|averaged|avg)(_|$)")
Path = tuple[str, ...]


class Names:
    """The new name of each weight, in `new`; what is not in it is left out.

    `_orig_mod` and its like are wrappers anywhere. `module` (DataParallel, DDP) is one where it is
    the only child of its parent, because a wrapper has no other; `n_averaged` beside it is
    AveragedModel's counter and goes with it.

    Args:
        names: as in the file.
        prefix: the network's place, or "auto": in a LightningModule `net`, `model`, `network` or
            its only child; otherwise the whole.
        is_lightning: whether the names begin at a LightningModule.
        keep_module: leave all `module` segments alone.
        known: the network's own names, prefix included; a `module` in them stays.
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
        public = {name: _public(name) for name in names}
        self._wrappers = set() if keep_module else _find_wrappers(set(public.values()), known)
        paths = {
            name: _strip(path, self._wrappers)
            for name, path in public.items()
            if path[-1] != "n_averaged" or (*path[:-1], "module") not in self._wrappers
        }
        if prefix == "auto":
            self._prefix = _auto_prefix(paths.values(), ema) if is_lightning else ()
        else:
            self._prefix = self._module_path(prefix.rstrip("."))
        self.new: dict[str, str] = {}
        owners: dict[str, str] = {}
        for name, path in paths.items():
            if new := self._below_prefix(path):
                owner = owners.setdefault(new, name)
                if owner != name:
                    raise CheckpointError(f"{owner} and {name} would both become {new}")
                self.new[name] = new
        if not self.new:
            groups = ", ".join(sorted({path[0] for path in paths.values()})[:20])
            wanted = "no tensor has a name" if prefix == "auto" else f"nothing is called {prefix}.*"
            raise CheckpointError(f"{wanted}; there is: {groups}")

    def _module_path(self, name: str) -> Path:
        tensor = _public(f"{name}.weight" if name else "weight")
        return _strip(tensor, self._wrappers)[:-1]

    def _below_prefix(self, path: Path) -> str | None:
        depth = len(self._prefix)
        return ".".join(path[depth:]) if path[:depth] == self._prefix else None

    def metadata(self, metadata: Mapping[Any, Any]) -> dict[str, Any]:
        """Rename the modules of a state_dict's `_metadata`; a wrapper's entry gives way.

        Only whole numbers are kept (a module's version is one).
        """
        renamed: dict[str, Any] = {}
        for name, entries in metadata.items():
            if isinstance(name, str) and isinstance(entries, dict):
                new = self._below_prefix(self._module_path(name))
                if new is not None:
                    renamed[new] = {str(k): v for k, v in entries.items() if type(v) is int}
        return renamed


def _public(name: str) -> Path:
    """Return the path of a tensor without the wrappers that are known by their names."""
    *modules, leaf = name.split(".", _MAX_DEPTH)
    if len(modules) == _MAX_DEPTH:
        raise CheckpointError(f"damaged: it holds names of more than {_MAX_DEPTH} parts")
    return (*(part for part in modules if part not in _PRIVATE), leaf)


def _strip(path: Path, wrappers: Collection[Path]) -> Path:
    return tuple(part for i, part in enumerate(path) if path[: i + 1] not in wrappers)


def _find_wrappers(paths: Collection[Path], known: Collection[str]) -> set[Path]:
    """Return the paths of the modules called `module` that are wrappers."""
    children: defaultdict[Path, set[str]] = defaultdict(set)
    inside: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in paths:
        for i, part in enumerate(path):
            children[path[:i]].add(part)
            if part == "module":
                inside[path[: i + 1]].append(path)
    found: set[Path] = set()
    # From the outermost on: whether a name is known is asked without the wrappers around it.
    for module in sorted(inside, key=len):
        is_alone = children[module[:-1]] <= {"module", "n_averaged"} and module not in paths
        if is_alone and not all(".".join(_strip(path, found)) in known for path in inside[module]):
            found.add(module)
    return found


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
