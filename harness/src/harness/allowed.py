"""What a YAML file may name: the classes and functions that are built from a config.

A ``_target_`` is imported and called, and a YAML file may be somebody else's: an experiment, or the
config of a run. So there are two looks. Before any import, the first word of a name must be of the
owner, the harness, or a package that either requires. When it is built, the object must be of a
kind that an experiment consists of, such as a network or a callback. What conf/rules.yaml or
``YAML_ALLOWED`` adds is the owner's; no word, no experiment and no run's folder adds to it. This is
no sandbox: what is allowed does with its arguments what it does. Imports no torch.
"""

import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra.utils
import yaml
from omegaconf import DictConfig, ListConfig

from harness.errors import UserError
from harness.places import shown

RULES = "rules.yaml"
VARIABLE = "YAML_ALLOWED"  # more names, with commas, for one process and those that it starts
NAME = re.compile(r"\w+(\.\w+)*")
# First words that need no look at the metadata of packages, which takes half a second.
USUAL = (__package__, "torch", "pytorch_lightning", "lightning", "torchmetrics", "optuna", "timm")
KINDS = {  # base classes of what an experiment consists of, by the module that has them
    "torch.nn": ["Module"],  # also of torchmetrics.Metric and LightningModule
    "torch.optim": ["Optimizer"],
    "torch.optim.lr_scheduler": ["LRScheduler"],
    "torch.utils.data": ["Dataset", "Sampler"],
    "pytorch_lightning": ["LightningDataModule", "Trainer", "Callback"],
    "pytorch_lightning.loggers": ["Logger"],
    "pytorch_lightning.profilers": ["Profiler"],
    "pytorch_lightning.strategies": ["Strategy"],
    "optuna.samplers": ["BaseSampler"],
}
FUNCTIONS = ("torch.nn.functional", "torch.nn.init")  # modules whose own functions may be called
EXACT = ("timm.create_model", "datetime.timedelta")  # timedelta: of Timer, and of time-outs
PIPES = "torch.utils.data.datapipes."  # data sets of torch that unpickle files, call and write

logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # we say what it would say
_rules = Path("conf", RULES)
_own: tuple[str, ...] = ()


def follow(conf: str | Path) -> None:
    """Read the owner's rules, for this process, from a folder of config files.

    Raises:
        UserError: if they are no list of names.
    """
    global _rules, _own
    _rules = Path(conf, RULES)
    own = owners_rules(conf).get("allowed") or []
    _own = tuple(str(name).removesuffix(".*") for name in own) if isinstance(own, list) else ("",)
    _own += tuple(filter(None, os.environ.get(VARIABLE, "").split(",")))
    _required_modules.cache_clear()
    if not all(NAME.fullmatch(name) for name in _own):
        raise UserError(
            f"{shown(_rules)}: allowed: {own!r}, or {VARIABLE}, is no list of names.\n"
            "Write packages, or whole names, such as allowed: [my_package]"
        )


def owners_rules(conf: str | Path) -> dict[str, Any]:
    """Read the ``rules.yaml`` of a folder of config files; without one there are no rules.

    Raises:
        UserError: if it is no YAML, or has no keys.
    """
    path = Path(conf, RULES)
    try:
        rules = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except yaml.YAMLError as error:
        raise UserError(f"{shown(path)} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(rules, dict | None):
        raise UserError(f"{shown(path)} must hold keys, such as allowed: [my_package].")
    return rules or {}


def targets(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every node below and including ``node`` that has a ``_target_``, with its key."""
    if isinstance(node, (list, ListConfig)):
        for i, child in enumerate(node):
            yield from targets(child, f"{key}[{i}]")
    elif isinstance(node, (dict, DictConfig)):
        if node.get("_target_") is not None:
            yield key, node
        for name, child in node.items():
            yield from targets(child, f"{key}.{name!s}" if key else str(name))


def check(cfg: Any) -> None:
    """Take the first look, at every name in a config; import nothing.

    Raises:
        UserError: with all names of unknown packages, and the line that allows them.
    """
    refused: dict[str, str] = {}
    for key, node in targets(cfg):
        name = str(node["_target_"])
        word = name.partition(".")[0]
        if word in USUAL or name in EXACT or _is_owners(name) or word in _required_modules():
            continue
        if word in sys.modules or find_spec(word) is not None:  # else the import reports it
            is_standard = word in sys.stdlib_module_names  # too much to trust as a whole
            refused[f"{key}._target_: {name}".lstrip(".")] = name if is_standard else word
    if refused:
        raise UserError(_refusal(refused))


def check_object(key: str, name: str, target: Any) -> None:
    """Take the second look: whether the object that a name leads to may be called.

    Raises:
        UserError: with what it is, and the line that allows it.
    """
    module, path = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    real = f"{module}.{path}" if isinstance(module, str) and isinstance(path, str) else name
    if name in (*EXACT, *_own) or real in _own or _may_be_built(target, str(module)):
        return
    what = f"{key}._target_: {name}".lstrip(".")
    raise UserError(_refusal({what if real == name else f"{what} is {real}, and": real}))


def instantiate(node: Any, **given: Any) -> Any:
    """Build what a node names after both looks; see ``hydra.utils.instantiate``.

    Raises:
        UserError: with the line that allows it.
    """
    check(node)
    for key, one in targets(node):
        name = str(one["_target_"])
        with suppress(ImportError):  # Hydra reports it
            check_object(key, name, hydra.utils.get_object(name))
    return hydra.utils.instantiate(node, **given)


def _may_be_built(target: Any, module: str) -> bool:
    if inspect.isclass(target):
        # A subclass has imported the module of its base.
        homes = [(sys.modules[home], names) for home, names in KINDS.items() if home in sys.modules]
        bases = tuple(getattr(home, name) for home, names in homes for name in names)
        return _is_owners(module) or (issubclass(target, bases) and not module.startswith(PIPES))
    if inspect.isroutine(target) and module in (*FUNCTIONS, "torch._C._nn", "torch", "None"):
        # Functions written in C belong to no module, or to torch itself.
        functions = [vars(sys.modules[home]) for home in FUNCTIONS if home in sys.modules]
        if any(one is target for module_vars in functions for one in module_vars.values()):
            return True
    # No method: `load_from_checkpoint` unpickles, `Strategy.remove_checkpoint` deletes.
    is_method = "." in getattr(target, "__qualname__", ".")
    return not is_method and (_is_owners(module) or module.startswith(f"{__package__}.knobs."))


def _is_owners(name: str) -> bool:
    return any(f"{name}.".startswith(f"{one}.") for one in _own)


@cache
def _required_modules() -> set[str]:
    """Top-level modules of packages that the owner's and the harness require, with extras.

    The owner's packages are those that hold the allowed names, and those installed from folders.
    """
    modules = metadata.packages_distributions()
    words = {name.partition(".")[0] for name in (__package__, *_own)}
    owners = {one for word in words for one in modules.get(word, ())}
    owners |= {d.name for d in metadata.distributions() if '"dir_info"' in _origin(d)}
    lines = [line for owner in owners for line in metadata.requires(owner) or ()]
    required = {_normalized(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}
    return {name for name, of in modules.items() if not required.isdisjoint(map(_normalized, of))}


def _origin(distribution: metadata.Distribution) -> str:
    return distribution.read_text("direct_url.json") or ""


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _refusal(refused: dict[str, str]) -> str:
    """Say how to allow names, of which each has its place in the config."""
    names = dict.fromkeys(refused.values())
    are, them = ("is", "it") if len(refused) == 1 else ("are", "them")
    way = f"If you trust {them},"
    modules = metadata.packages_distributions()
    if all(name in modules for name in names):  # packages that pip has installed
        packages = " and ".join(dict.fromkeys(modules[name][0] for name in names))
        way = (
            f"Add {packages} to requirements.txt and type pip install -e . , "
            f"or, if you trust all of {them},"
        )
    return (
        f"{' and '.join(refused)} {are} not allowed. {way} write in "
        f"{shown(_rules)}: allowed: [{', '.join([*_own, *names])}]"
    )
