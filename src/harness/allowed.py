"""What a YAML file may name: the classes and functions that are built from a config.

A ``_target_`` is called, and a YAML file may come from somebody else, with an experiment or with a
run. What is listed below and in conf/rules.yaml is built, and nothing else, whatever other name
it is given (``torch.nn.functional.torch.load`` is ``torch.serialization.load``). That file alone
is read, and ``YAML_ALLOWED``: no word, no experiment and no run's folder adds to it. Hydra 1.4
gets the same list, and looks at what is returned as well; for 1.3 the check here is the only one.
No sandbox: what is allowed does with its arguments what it does.
"""

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hydra.utils
import yaml
from hydra.errors import InstantiationException
from omegaconf import DictConfig, ListConfig, OmegaConf

from harness.errors import UserError
from harness.hydra_versions import building_only
from harness.places import shown

RULES = "rules.yaml"
VARIABLE = "YAML_ALLOWED"  # more names, with commas, for one process and those that it starts
LIGHTNING = ("Trainer", "callbacks", "demos", "loggers", "profilers", "strategies")
# The rooms whose classes a YAML file has a use for. Elsewhere are functions that load a pickle or
# start a program, as also in the rest of torch: torch.load, torch.hub.load.
BASE = (
    *(f"{__package__}.{room}" for room in ("data", "images", "knobs", "loggers", "strategies")),
    *(f"{__package__}.{room}" for room in ("tables", "text", "watch")),
    *(f"{__package__}.prove.{name}" for name in ("probing.Probe", "recording.Recorder")),
    *("torch.nn", "torch._C._nn", "torch._VariableFunctionsClass", "torch.optim", "torchmetrics"),
    *(f"pytorch_lightning.{name}" for name in LIGHTNING),
    *(f"lightning.pytorch.{name}" for name in LIGHTNING),
    *("hydra.experimental.callbacks", "optuna.samplers", "timm.create_model", "timm.models"),
    "datetime.timedelta",  # of Timer, and of collective operations
)
NAME = re.compile(r"\w+(\.\w+)*")
NOT_LISTED = re.compile(r"Target '(\S+)'(?: \(resolved from '(\S+)'\))? is not in the Hydra")
PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.")
FINDERS = {f"hydra.utils.get_{kind}" for kind in ("class", "method", "object")}  # of their `path`

logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # we say what it would say
_rules = Path("conf", RULES)
_own: tuple[str, ...] = ()


def follow(conf: str | Path) -> None:
    """Let this process build what the rules in a folder of config files allow, from here on.

    Raises:
        UserError: if they are no list of names.
    """
    global _rules, _own
    _rules = Path(conf, RULES)
    found = yaml.safe_load(_rules.read_text(encoding="utf-8")) if _rules.is_file() else None
    own = found.get("allowed") or [] if isinstance(found, dict) else []
    _own = tuple(str(name).removesuffix(".*") for name in own) if isinstance(own, list) else ("",)
    _own += tuple(filter(None, os.environ.get(VARIABLE, "").split(",")))
    if not all(NAME.fullmatch(name) for name in _own):
        raise UserError(
            f"{shown(_rules)}: allowed: {own!r}, or {VARIABLE}, is no list of names.\n"
            "Write packages, or whole names, such as allowed: [my_package]"
        )


def followed() -> Path:
    """The folder whose rules this process follows; one that it starts has to be told."""
    return _rules.parent


def own_names() -> tuple[str, ...]:
    """What the rules and the environment add, for ``VARIABLE``."""
    return _own


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


def check(cfg: Any, key: str = "") -> None:
    """Refuse a config that names what is not allowed; imports nothing.

    Raises:
        UserError: with the line that allows it.
    """
    for place, node in targets(cfg, key):
        for name in _named(node):
            # What is nowhere cannot be called, and is told where it is looked for.
            if not _is_allowed(name) and _exists(name.partition(".")[0]):
                raise UserError(refusal(f"{place}._target_: {name}", name))


def instantiate(node: Any, **given: Any) -> Any:
    """Build what a node names, if that is allowed; see ``hydra.utils.instantiate``.

    Raises:
        UserError: with the line that allows it.
    """
    check(node)
    for key, one in targets(node):
        for name in _named(one):
            with suppress(ImportError):  # which Hydra tells of
                check_found(key, name, hydra.utils.get_object(name))
    try:
        with building():
            return hydra.utils.instantiate(node, **given)
    except InstantiationException as error:
        if (found := NOT_LISTED.match(str(error))) is None:
            raise
        name, of = found.groups()
        key = str(error).partition("full_key: ")[2]
        what = f"{of} returns {name}, and that" if of else name
        raise UserError(refusal(f"{key}: {what}" if key else what, name)) from error


def building() -> Any:
    """Let also Hydra, in the block, build nothing else: also where the owner's code calls it."""
    return building_only((*BASE, *FINDERS, *_own))


def check_found(key: str, name: str, found: Any) -> None:
    """Refuse an object that an allowed name leads to, and that belongs elsewhere.

    Raises:
        UserError: with the line that allows it.
    """
    if name in (*BASE, *_own):
        return
    if isinstance(found, partial):
        return check_found(key, name, found.func)
    module, path = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    of = getattr(found, "__self__", None)  # of a function that is written in C
    if module is None and isinstance(of, type):  # such as torch.conv2d
        module = of.__module__
    if not isinstance(module, str) or not isinstance(path, str) or "__" in name:
        raise UserError(refusal(f"{key}._target_: {name} is no class or function, and that", name))
    if not _is_allowed(real := f"{module}.{path}"):
        raise UserError(refusal(f"{key}._target_: {name} is {real}, and that", real))


def refusal(what: str, name: str) -> str:
    """Say in a line that something may not be named, and what to write where it is trusted."""
    package = name.partition(".")[0]
    is_wide = package in {*sys.stdlib_module_names, *(one.partition(".")[0] for one in BASE)}
    lines = ", ".join([*_own, name if is_wide else package])
    return f"{what} is not allowed. If you trust it, write in {shown(_rules)}: allowed: [{lines}]"


def check_hydra(settings: Any) -> None:
    """Refuse what Hydra itself would call: in its callbacks, its plugins' settings, its logging.

    Raises:
        UserError: with the line that allows it.
    """
    whole: Any = OmegaConf.to_container(settings)  # as it is written: it needs what comes later
    for key, node in targets(whole):
        for name in _named(node):
            is_plugin = key in ("launcher", "sweeper") and name.startswith(PLUGINS)
            if not is_plugin and not _is_allowed(name):
                raise UserError(refusal(f"hydra.{key}._target_: {name}", name))
    for key in ("job_logging", "hydra_logging"):
        _check_logging(whole.get(key), f"hydra.{key}")


def _check_logging(node: Any, key: str) -> None:
    """Refuse what ``logging.config`` would import and call."""
    if isinstance(node, (list, tuple)):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return
    for name, value in node.items():
        called = value if name in ("()", "class") else None
        if isinstance(value, str) and value.startswith("ext://"):
            called = value.removeprefix("ext://")
        known = ("logging.StreamHandler", "logging.FileHandler", "sys.stdout", "sys.stderr")
        if called is not None and called not in known and not _is_allowed(str(called)):
            raise UserError(refusal(f"{key}.{name}: {called}", str(called)))
        _check_logging(value, f"{key}.{name}")


def _named(node: Any) -> list[str]:
    name = str(node["_target_"])
    if name not in FINDERS:
        return [name]
    if node.get("_args_") or not isinstance(node.get("path"), str):
        raise UserError(f"{name} takes path=<name> here, and nothing else.")
    return [name, node["path"]]


def _is_allowed(name: str) -> bool:
    return name in FINDERS or any(f"{name}.".startswith(f"{one}.") for one in (*BASE, *_own))


def _exists(module: str) -> bool:
    try:
        return module in sys.modules or find_spec(module) is not None
    except ValueError:
        return True
