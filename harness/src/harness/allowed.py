"""Decide what a YAML file may name: the classes and functions that are built from a config.

A ``_target_`` is imported and called, and a YAML file may be somebody else's. Before any import,
the first word of a name must be of the owner, the harness, or a package that either requires. When
it is built, the object must be of a kind that an experiment consists of. Only conf/rules.yaml and
``YAML_ALLOWED`` add names. This is no sandbox for the arguments. Imports no torch.
"""

import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra.utils
import yaml
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.errors import UserError
from harness.names import did_you_mean, shown

RULES = "rules.yaml"
EXTRAS = {"timm": "timm", "tokenizers": "text"}  # that install a package which YAML files name
VARIABLE = "YAML_ALLOWED"  # more names, with commas, for one process and its children
# First words that need no look-up in the metadata of packages, which takes half a second.
USUAL = (__package__, "torch", "pytorch_lightning", "lightning", "torchmetrics", "optuna", "timm")
KINDS = (  # base classes of what an experiment consists of; Module also of torchmetrics.Metric
    *("torch.nn.Module", "torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler"),
    *("torch.utils.data.Dataset", "torch.utils.data.Sampler", "pytorch_lightning.Trainer"),
    *("pytorch_lightning.LightningDataModule", "pytorch_lightning.Callback"),
    *("pytorch_lightning.loggers.Logger", "pytorch_lightning.profilers.Profiler"),
    *("pytorch_lightning.strategies.Strategy", "optuna.samplers.BaseSampler"),
)
FUNCTIONS = ("torch.nn.functional", "torch.nn.init")  # modules whose functions may be called
EXACT = ("timm.create_model", "datetime.timedelta")  # timedelta: of Timer, and of time-outs
PIPES = "torch.utils.data.datapipes."  # data sets of torch that unpickle files, call and write

logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # repeats what our messages say
_rules = Path("conf", RULES)
_own: tuple[str, ...] = ()


def follow(conf: str | Path) -> None:
    """Read the owner's rules from a folder of config files; a UserError if they are no names."""
    global _rules, _own
    _rules, own = Path(conf, RULES), owners_rules(conf).get("allowed") or []
    if not isinstance(own, list) or not all(re.fullmatch(r"\w+(\.\w+)*", str(one)) for one in own):
        raise UserError(
            f"{shown(_rules)}: allowed: {own!r} is no list of names.\n"
            "Write packages, or whole names, such as allowed: [my_package]"
        )
    _own = (*map(str, own), *filter(None, os.environ.get(VARIABLE, "").split(",")))
    _required_modules.cache_clear()


def owners_rules(conf: str | Path) -> dict[str, Any]:
    """Read the ``rules.yaml`` of a folder; empty without one, a UserError if it has no keys."""
    path = Path(conf, RULES)
    try:
        rules = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except yaml.YAMLError as error:
        raise UserError(f"{shown(path)} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(rules, dict | None):
        raise UserError(f"{shown(path)} must hold keys, such as allowed: [my_package].")
    return rules or {}


def targets(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``node`` and every node below it that has a ``_target_``, with its key."""
    if isinstance(node, (list, ListConfig)):
        for i, child in enumerate(node):
            yield from targets(child, f"{key}[{i}]")
    elif isinstance(node, (dict, DictConfig)):
        if node.get("_target_") is not None:
            yield key, node
        for name, child in node.items():
            yield from targets(child, f"{key}.{name!s}" if key else str(name))


def packages_named(cfg: Any) -> set[str]:
    """Return the first words of all names in a config."""
    return {str(node["_target_"]).partition(".")[0] for _, node in targets(cfg)}


def check(cfg: Any) -> None:
    """Refuse a config whose names begin with words that are not allowed; import nothing."""
    refused: dict[str, str] = {}
    for key, node in targets(cfg):
        name = str(node["_target_"])
        word = name.partition(".")[0]
        if word == name:
            raise UserError(f"{key}._target_={name} needs its package: <package>.<module>.{name}")
        if word in USUAL or name in EXACT or is_owners(name) or word in _required_modules():
            continue
        if word in sys.modules or find_spec(word) is not None:  # else the import reports it
            is_standard = word in sys.stdlib_module_names  # too much to allow as a whole
            refused[f"{key}._target_: {name}".lstrip(".")] = name if is_standard else word
    if refused:
        raise UserError(_refusal(refused))


def imported(cfg: Any) -> Iterator[tuple[str, Any, Any]]:
    """Import what a config names; yield the key, the node and the object of each ``_target_``.

    Raises:
        UserError: with the nearest real name, or the line that allows what is refused.
        InstantiationException: if a module exists and raises as it is imported.
    """
    check(cfg)
    for key, node in targets(cfg):
        name = str(node["_target_"])
        try:
            target = hydra.utils.get_object(name)
        except ImportError as error:
            cause = error.__cause__
            absent = str(cause.name) if isinstance(cause, ModuleNotFoundError) else ""
            parent, _, last = (absent or name).rpartition(".")
            is_absent = absent and f"{name}.".startswith(f"{absent}.")
            if not is_absent and "is an attribute of" not in str(error):
                # The module exists and raises: not a typo in the config.
                raise InstantiationException(f"{name}\nfull_key: {key}") from cause
            siblings = vars(sys.modules[parent]) if parent in sys.modules else ()
            hint = did_you_mean(last, siblings, f"{parent}.")
            if absent in EXTRAS:
                hint = f" Install it: pip install -e '.[{EXTRAS[absent]}]'."
            raise UserError(f"{key}._target_: {name} does not exist.{hint}") from error
        _check_object(key, name, target)
        yield key, node, target


def instantiate(node: Any, **given: Any) -> Any:
    """Build a node as ``hydra.utils.instantiate`` does, if all that it names may be built."""
    for _ in imported(node):
        pass
    return hydra.utils.instantiate(node, **given)


def _check_object(key: str, name: str, target: Any) -> None:
    """Refuse the imported object of a name unless it may be called."""
    module, path = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    real = f"{module}.{path}" if isinstance(module, str) and isinstance(path, str) else name
    if name in (*EXACT, *_own) or real in _own or _may_be_built(target, str(module)):
        return
    what = f"{key}._target_: {name}".lstrip(".")
    raise UserError(_refusal({what if real == name else f"{what} is {real}, and": real}))


def _may_be_built(target: Any, module: str) -> bool:
    loaded = sys.modules  # a module that is not imported has no subclasses
    if inspect.isclass(target):
        homes = [kind.rpartition(".") for kind in KINDS]
        bases = tuple(getattr(loaded[home], name) for home, _, name in homes if home in loaded)
        return is_owners(module) or (issubclass(target, bases) and not module.startswith(PIPES))
    if inspect.isroutine(target) and module in (*FUNCTIONS, "torch._C._nn", "torch", "None"):
        # The module of a function in C is not where torch shows it, or there is none.
        functions = [
            one for home in FUNCTIONS if home in loaded for one in vars(loaded[home]).values()
        ]
        if any(one is target for one in functions):
            return True
    # Methods are refused: `load_from_checkpoint` unpickles, `Strategy.remove_checkpoint` deletes.
    is_method = "." in getattr(target, "__qualname__", ".")
    return not is_method and (is_owners(module) or module.startswith(f"{__package__}.knobs."))


def is_owners(name: str) -> bool:
    """Return whether a package, or what is in it, counts as the owner's."""
    return any(f"{name}.".startswith(f"{one}.") for one in _own)


@cache
def _required_modules() -> set[str]:
    """Return top-level modules of what the owner's packages and the harness require.

    The owner's packages are those of the allowed names, and those installed from folders.
    """
    modules = metadata.packages_distributions()
    words = {name.partition(".")[0] for name in (__package__, *_own)}
    owners = {one for word in words for one in modules.get(word, ())}
    for one in metadata.distributions():
        if '"dir_info"' in (one.read_text("direct_url.json") or ""):
            owners.add(one.name)
    lines = [line for owner in owners for line in metadata.requires(owner) or ()]
    required = {canonicalize_name(Requirement(line).name) for line in lines}
    return {name for name in modules if required & {*map(canonicalize_name, modules[name])}}


def _refusal(refused: dict[str, str]) -> str:
    """Say how to allow names, given by their places in the config."""
    are, them = ("is", "it") if len(refused) == 1 else ("are", "them")
    names = ", ".join([*_own, *dict.fromkeys(refused.values())])
    return (
        f"{' and '.join(refused)} {are} not allowed. If you trust {them}, write in "
        f"{shown(_rules)}: allowed: [{names}]"
    )
