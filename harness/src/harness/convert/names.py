"""Name the weights as the bare network does.

In: the names of a state_dict. Out: the new name of each one that is taken. The rules:
- `_orig_mod` and its like (WRAPPERS) are wrappers wherever they are a whole part of a name.
- `module` (DataParallel, DDP) is a wrapper where it is the only child of its parent; `n_averaged`
  beside it is AveragedModel's counter and goes with it.
- A LightningModule's network is its child `net` or `model`, or an average of that with its names.
- A prefix that is given says where the network is, and below it `module` is no wrapper.
"""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from .tensors import CheckpointError

NETWORKS = ("net", "model")  # what a LightningModule usually calls its network
# Names that only wrappers use: torch.compile, FSDP, activation checkpointing, Fabric.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_AVERAGE = re.compile(r"(?i)(?<![a-z])(ema|swa|averaged?)(?![a-z])")
Path = list[str]  # the parts of a name


def rename(
    names: Iterable[str], prefix: str, is_lightning: bool, ema: bool, keep_module: bool
) -> tuple[dict[str, str], list[str]]:
    """Return the new name of each weight that is taken, and notes on what was decided by names.

    With `is_lightning` the names begin at a LightningModule, and prefix "auto" finds the network
    in it, with `ema` its average. With `keep_module` `module` is no wrapper.

    Raises:
        CheckpointError: nothing has that prefix, or two names would become one.
    """
    notes: list[str] = []
    paths: dict[str, Path] = {}
    for name in names:
        *modules, leaf = name.split(".")
        paths[name] = [*(part for part in modules if part not in WRAPPERS), leaf]
    is_unclear, network = False, [part for part in prefix.split(".") if part]
    if prefix == "auto":
        if not keep_module:
            paths, is_unclear = _without_module(paths)
        network, notes = _network(paths.values(), ema) if is_lightning else ([], [])
    if is_unclear:
        option = f"--prefix {quoted('.'.join(network))} takes it for the network's own child"
        notes = [f"`module` was taken for a wrapper (DataParallel, DDP); {option}", *notes]
    depth, owners = len(network), dict[str, str]()
    for name, path in paths.items():
        if path[:depth] == network and path[depth:]:
            new = ".".join(path[depth:])
            if owners.setdefault(new, name) != name:
                raise CheckpointError(f"{owners[new]} and {name} would both become {new}")
    if not owners:
        there = ", ".join(sorted({path[0] for path in paths.values()})[:20])
        what = "no tensor has a name" if prefix == "auto" else f"nothing is called {prefix}.*"
        raise CheckpointError(f"{what}; there is: {there}")
    return {name: new for new, name in owners.items()}, notes


def _without_module(paths: dict[str, Path]) -> tuple[dict[str, Path], bool]:
    """Take away each `module` that is a wrapper, and say whether only its name tells that."""
    tree: dict[str, Any] = {}  # of dicts
    for path in paths.values():
        node = tree
        for part in path:
            node = node.setdefault(part, {})
    stripped: dict[str, Path] = {}
    is_unclear = False
    for name, path in paths.items():
        node, parts, is_counter = tree, list[str](), False
        for part in path:
            is_wrapped = bool(node.get("module")) and len(node) == 1 + ("n_averaged" in node)
            if not is_wrapped:
                parts.append(part)
            is_counter |= is_wrapped and part == "n_averaged"
            is_unclear |= is_wrapped and len(node) == 1
            node = node[part]
        if not is_counter:
            stripped[name] = parts
    return stripped, is_unclear


def _network(paths: Iterable[Path], ema: bool) -> tuple[Path, list[str]]:
    """Return the place of a LightningModule's network, or of its average."""
    children: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
    for path in paths:
        children[path[0]].add(tuple(path[1:]))
    network = next((name for name in NETWORKS if name in children), None)
    if network is None or () in children[network]:
        return [], []
    for name, inside in children.items() if ema else ():
        if is_average(name) and inside == children[network]:
            return [name], [f"{name} is the average of {network}; --no-ema takes {network}"]
    return [network], []


def is_average(name: str) -> bool:
    """Whether averaged weights are usually called so."""
    return bool(_AVERAGE.search(name))


def printable(text: str) -> str:
    """Return the text in one line, with what a terminal would obey escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def quoted(text: object) -> str:
    """Return the text as one word of a command."""
    return shlex.quote(printable(str(text)))
