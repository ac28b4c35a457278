"""Decide which classes and functions a YAML file may name as ``_target_``. Imports no torch.

Each ``_target_`` is imported and called, but a YAML file may come from a stranger. So the name is
checked twice:

- Before the import, its top-level package must be the user's, this library, or a requirement of
  either of them.
- Before the call, the object must be of a kind that an experiment consists of, such as a module.

``conf/rules.yaml`` and ``YAML_ALLOWED`` allow more names. The arguments are not checked.
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

from harness.compat import hydra_versions
from harness.display import display_path
from harness.errors import UserError
from harness.failed_imports import missing_module
from harness.suggestions import suggest

RULES = "rules.yaml"
VARIABLE = "YAML_ALLOWED"  # more names, separated by commas, for a process and its children
# These packages need no look-up in the metadata of all packages, which takes 0.5 seconds.
USUAL = (__package__, "torch", "pytorch_lightning", "lightning", "torchmetrics", "optuna", "timm")
KINDS = (  # base classes of allowed classes; torchmetrics.Metric is a Module
    *("torch.nn.Module", "torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler"),
    *("torch.utils.data.Dataset", "torch.utils.data.Sampler", "pytorch_lightning.Trainer"),
    *("pytorch_lightning.LightningDataModule", "pytorch_lightning.Callback"),
    *("pytorch_lightning.loggers.Logger", "pytorch_lightning.profilers.Profiler"),
    *("pytorch_lightning.strategies.Strategy", "optuna.samplers.BaseSampler"),
)
FUNCTIONS = ("torch.nn.functional", "torch.nn.init")  # modules whose functions may be called
EXACT = ("timm.create_model", "datetime.timedelta")  # Timer and time-outs take a timedelta
PIPES = "torch.utils.data.datapipes."  # these data sets unpickle and write files, and call code

logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # Hydra would log our errors again
_rules = Path("conf", RULES)
_allowed_names: tuple[str, ...] = ()


def load_rules(conf: str | Path) -> None:
    """Load the allowed names of the user's ``rules.yaml`` in a folder of configs.

    Raises:
        UserError: if the allowed names are not a list of names.
    """
    global _rules, _allowed_names
    _rules, names = Path(conf, RULES), read_rules(conf).get("allowed") or []
    pattern = re.compile(r"\w+(\.\w+)*")
    if not isinstance(names, list) or not all(pattern.fullmatch(str(name)) for name in names):
        raise UserError(
            f"In {display_path(_rules)}, allowed={names!r} must be a list of packages, classes or "
            "functions,\nsuch as allowed: [my_package, other_package.module.Class]"
        )
    _allowed_names = (*map(str, names), *filter(None, os.environ.get(VARIABLE, "").split(",")))
    _required_modules.cache_clear()


def read_rules(conf: str | Path) -> dict[str, Any]:
    """Return the ``rules.yaml`` of a folder, or ``{}`` if there is none.

    Raises:
        UserError: the file is not valid YAML, or has no keys.
    """
    path = Path(conf, RULES)
    try:
        rules = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"{display_path(path)} is not valid YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(rules, dict | None):
        raise UserError(
            f"{display_path(path)} has no keys. Write keys, such as allowed: [my_package]."
        )
    return rules or {}


def targets(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, node) for ``node`` and each node below it that has a ``_target_``."""
    if isinstance(node, (list, ListConfig)):
        for i, child in enumerate(node):
            yield from targets(child, f"{key}[{i}]")
    elif isinstance(node, (dict, DictConfig)):
        if node.get("_target_") is not None:
            yield key, node
        for name, child in node.items():
            yield from targets(child, f"{key}.{name!s}" if key else str(name))


def packages_named(cfg: Any) -> set[str]:
    """Return the top-level packages of all targets in a config."""
    return {str(node["_target_"]).partition(".")[0] for _, node in targets(cfg)}


def check(cfg: Any) -> None:
    """Raise a ``UserError`` if a target's package is not allowed, without importing anything."""
    refused: dict[str, str] = {}
    for key, node in targets(cfg):
        name = str(node["_target_"])
        package = name.partition(".")[0]
        if package == name:
            raise UserError(f"{key}._target_={name} needs its package: <package>.<module>.{name}")
        if not all(part.isidentifier() for part in name.split(".")):
            raise UserError(f"{key}._target_={name} is not of the form <package>.<module>.<name>.")
        for flag in ("_partial_", "_recursive_"):
            if not isinstance(node.get(flag, True), bool):
                raise UserError(f"{key}.{flag}={node[flag]} must be true or false.")
        if package == "src" and _allowed_names and not is_in_rules("src"):
            raise UserError(f"{key}._target_: {name}: write {_allowed_names[0]} in place of src.")
        if package in USUAL or name in EXACT or is_in_rules(name) or package in _required_modules():
            continue
        if package in sys.modules or find_spec(package) is not None:  # else the import reports it
            is_standard = package in sys.stdlib_module_names  # do not suggest to allow all of it
            refused[f"{key}._target_: {name}".lstrip(".")] = name if is_standard else package
    if refused:
        raise UserError(_refusal(refused))


def import_targets(cfg: Any) -> Iterator[tuple[str, Any, Any]]:
    """Import the targets of a config; yield the key, the node and the object of each.

    Raises:
        UserError: a target does not exist, and the message suggests a similar name. Or a target is
            not allowed, and the message has the line that would allow it.
        InstantiationException: a module exists, but its import raises.
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
                # The module exists, and its import raises: this is no typo in the config.
                raise InstantiationException(f"{name}\nfull_key: {key}") from cause
            siblings = vars(sys.modules[parent]) if parent in sys.modules else ()
            hint = suggest(last, siblings, f"{parent}.")
            if absent and not parent:
                is_misspelled = absent not in USUAL and suggest(absent, USUAL)
                hint = is_misspelled or f"\n{missing_module(str(cause))}"
            raise UserError(f"{key}._target_: {name} does not exist.{hint}") from error
        _check_object(key, name, target)
        yield key, node, target


def instantiate(node: Any, **given: Any) -> Any:
    """Return ``hydra.utils.instantiate(node, **given)`` if all targets in the node are allowed."""
    names = [str(found["_target_"]) for _, found, _ in import_targets(node)]
    return hydra_versions.instantiate(node, names, **given)


def _check_object(key: str, name: str, target: Any) -> None:
    """Raise a ``UserError`` if the object that a target names may not be called."""
    module, path = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    real_name = f"{module}.{path}" if isinstance(module, str) and isinstance(path, str) else name
    is_listed = name in (*EXACT, *_allowed_names) or real_name in _allowed_names
    if is_listed or _may_be_built(target, str(module)):
        return
    line = f"{key}._target_: {name}".lstrip(".")
    if real_name != name:
        line = f"{line} is {real_name}, and"
    raise UserError(_refusal({line: real_name}))


def _may_be_built(target: Any, module: str) -> bool:
    """Return whether an object, defined in ``module``, may be called from a config."""
    loaded = sys.modules  # classes of modules that are not loaded have no subclasses
    if inspect.isclass(target):
        kinds = [kind.rpartition(".") for kind in KINDS]
        bases = tuple(getattr(loaded[home], name) for home, _, name in kinds if home in loaded)
        return is_in_rules(module) or (issubclass(target, bases) and not module.startswith(PIPES))
    if inspect.isroutine(target) and module in (*FUNCTIONS, "torch._C._nn", "torch", "None"):
        # A C function's ``__module__`` does not name its public module, so compare the objects.
        public = [vars(loaded[home]).values() for home in FUNCTIONS if home in loaded]
        if any(function is target for functions in public for function in functions):
            return True
    # Refuse methods: `load_from_checkpoint` unpickles, and `Strategy.remove_checkpoint` deletes.
    is_method = "." in getattr(target, "__qualname__", ".")
    return not is_method and (is_in_rules(module) or module.startswith(f"{__package__}.features."))


def is_in_rules(name: str) -> bool:
    """Return whether the user's rules allow a name, or a package that contains it."""
    return any(f"{name}.".startswith(f"{allowed}.") for allowed in _allowed_names)


@cache
def _required_modules() -> set[str]:
    """Return the top-level modules that this library and the user's packages require.

    The user's packages are those of the allowed names, and those installed from folders.
    """
    modules = metadata.packages_distributions()
    packages = {name.partition(".")[0] for name in (__package__, *_allowed_names)}
    roots = {root for package in packages for root in modules.get(package, ())}
    for distribution in metadata.distributions():
        if '"dir_info"' in (distribution.read_text("direct_url.json") or ""):
            roots.add(distribution.name)
    lines = [line for root in roots for line in metadata.requires(root) or ()]
    required = {canonicalize_name(Requirement(line).name) for line in lines}
    return {name for name in modules if required & {*map(canonicalize_name, modules[name])}}


def _refusal(refused: dict[str, str]) -> str:
    """Return the message for refused names: the lines of the config, with the names to allow."""
    are, them = ("is", "it") if len(refused) == 1 else ("are", "them")
    names = ", ".join([*_allowed_names, *dict.fromkeys(refused.values())])
    return (
        f"{' and '.join(refused)} {are} not allowed. If you trust {them}, write in "
        f"{display_path(_rules)}: allowed: [{names}]"
    )
