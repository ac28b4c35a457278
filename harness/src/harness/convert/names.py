"""Name the weights as the bare network does: wrappers stripped, then the network's own prefix."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

from .tensors import CheckpointError

NETWORKS = ("net", "model", "network")  # what a LightningModule usually calls its network
# Names that averaged weights have: ema, model_ema, EMACallback, shadow_params; Adam's exp_avg not.
_AVERAGE = re.compile(
    r"(?<![A-Za-z])(?<!exp_)(ema|swa|avg|averaged?|shadow)(?![a-z])"
    r"|(?<![A-Z])(EMA|SWA|Ema|Swa|Averag(e|ed|ing))(?![a-z])"
)
# Names that only wrappers use: torch.compile, FSDP, activation checkpointing, Fabric.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_MAX_DEPTH = 100  # segments of a name
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
        keep_module: `module` is no wrapper.
        ema: prefer a submodule that is the network's average.

    Raises:
        CheckpointError: nothing has that prefix, or two names would become one.
    """

    def __init__(
        self,
        names: Iterable[str],
        prefix: str = "auto",
        is_lightning: bool = False,
        keep_module: bool = False,
        ema: bool = True,
    ) -> None:
        self.notes: list[str] = []
        marked = {name: _parts(name) for name in names}
        if not keep_module and _strip([*marked.values()]):
            self.notes.append(
                "`module` was taken for a wrapper (DataParallel, DDP); "
                "--keep-module if the network itself has a child of that name"
            )
        paths = {name: _stripped(path) for name, path in marked.items() if path[-1] is not None}
        self._prefix = _place("" if prefix == "auto" else prefix, paths.values())
        if prefix == "auto" and is_lightning:
            self._find_network(paths.values(), ema)
        depth, owners = len(self._prefix), dict[str, str]()
        for name, path in paths.items():
            if path[:depth] != self._prefix or not path[depth:]:
                continue
            new = ".".join(path[depth:])
            if owners.setdefault(new, name) != name:
                raise CheckpointError(f"{owners[new]} and {name} would both become {new}")
        self.new = {name: new for new, name in owners.items()}
        if not self.new:
            there = ", ".join(sorted({path[0] for path in paths.values() if path})[:20])
            what = "no tensor has a name" if prefix == "auto" else f"nothing is called {prefix}.*"
            raise CheckpointError(f"{what}; there is: {there}")

    def _find_network(self, paths: Iterable[Path], ema: bool) -> None:
        """Set the prefix to that of a LightningModule's network, or of its average."""
        groups = _groups(paths)
        network = next((name for name in NETWORKS if name in groups), None)
        if network is None and len(groups) == 1:
            network = next(iter(groups))
        if network is None or () in groups[network]:
            return
        self._prefix = [network]
        wanted = groups.pop(network)
        average = next(
            (n for n, inside in groups.items() if is_average(n) and inside == wanted), ""
        )
        if ema and average:
            self._prefix = [average]
            self.notes.append(f"{average} is the average of {network}; --no-ema takes {network}")


def is_average(name: str) -> bool:
    """Whether averaged weights are usually called so."""
    return bool(_AVERAGE.search(name))


def _groups(paths: Iterable[Path]) -> Groups:
    groups: Groups = defaultdict(set)
    for path in paths:
        groups[path[0]].add(tuple(path[1:]))
    return groups


def _place(prefix: str, paths: Collection[Path]) -> Path:
    """Return the path that a prefix means: as it is, or as the file has it, wrappers and all."""
    parts = [part for part in prefix.rstrip(".").split(".") if part and part not in WRAPPERS]
    is_there = any(path[: len(parts)] == parts for path in paths)
    return parts if is_there else [part for part in parts if part != "module"]


def _parts(name: str) -> MarkedPath:
    """Return the path of a tensor without the wrappers that are known by their names."""
    *modules, leaf = name.split(".", _MAX_DEPTH)
    if len(modules) == _MAX_DEPTH:
        raise CheckpointError(f"damaged: it holds names of more than {_MAX_DEPTH} parts")
    return [*(part for part in modules if part not in WRAPPERS), leaf]


def _stripped(path: MarkedPath) -> Path:
    return [part for part in path if part is not None]


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
