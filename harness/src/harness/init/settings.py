"""The settings below ``init``, and checks of the parts that they name.

In: a config's node. Out: a checked ``Init``. Next: ``weights`` and ``freezing`` use it. This file
imports no torch, so that a command can report mistakes before it makes a run's folder.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.display import join_first
from harness.errors import UserError
from harness.keys import as_names
from harness.suggestions import suggest


@dataclass(frozen=True)
class Init:
    """The settings below ``init``. A part is named as in the module, such as ``net.backbone``."""

    path: str | None = None  # a checkpoint, its folder or a run's folder; None: initial weights
    key: str | None = None  # this, prefix and ema choose the file's weights: see harness.convert
    prefix: str = "auto"
    ema: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)  # old -> new beginning of names
    strict: bool = True  # refuse a file if a tensor does not fit
    leave_out: tuple[str, ...] = ()  # parts that keep their initial weights
    freeze: tuple[str, ...] = ()  # parts that are not trained
    unfreeze_at_epoch: int | None = None  # counted from 0


def read_init(node: Any) -> Init:
    """Read the ``init`` settings from a config node or a dictionary. ``None`` means unset.

    Types are not checked here: the command has checked them before.

    Raises:
        UserError: a key does not exist, or settings clash.
    """
    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    values = {name: value for name, value in (plain or {}).items() if value is not None}
    keys = [each.name for each in fields(Init)]
    for name in values:
        if name not in keys:
            raise UserError(f"There is no key init.{name}.{suggest(name, keys, 'init.')}")
    values |= {name: str(values[name]) for name in {"path", "key", "prefix"} & values.keys()}
    for name in {"leave_out", "freeze"} & values.keys():
        values[name] = tuple(map(str, as_names(values[name])))
    if not isinstance(names := values.get("rename", {}), Mapping):
        raise UserError(f"init.rename={names} must map names: type init.rename={{fc:head}}.")
    values["rename"] = {str(old): str(new or "") for old, new in names.items()}
    if "unfreeze_at_epoch" in values and not values.get("freeze"):
        raise UserError(
            "init.unfreeze_at_epoch is set, but no part is frozen. Add init.freeze=[<part>]."
        )
    return Init(**values)


def check_file(path: str) -> None:
    """Check that ``init.path`` leads to a checkpoint.

    Raises:
        UserError: it does not.
    """
    from harness.convert.checkpoint import resolve_source  # only commands with init.path need it

    try:
        resolve_source(Path(path).expanduser())
    except UserError as error:
        raise UserError(f"init.path={str(error).removesuffix('.')}.") from error


def bare_name(name: str) -> str:
    """Return a tensor's name without wrappers, such as the ``_orig_mod`` of ``torch.compile``."""
    from harness.convert.choose import WRAPPERS  # imported here, so that commands start faster

    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def prefixes(names: Iterable[str]) -> dict[str, None]:
    """Return the names, and the parts that contain them: each once, the outer part first."""
    paths = [name.split(".") for name in names]
    return {".".join(path[:depth]): None for path in paths for depth in range(1, len(path) + 1)}


def check_parts(setting: str, parts: Iterable[str], names: Iterable[str]) -> None:
    """Check that each part in a setting contains a tensor.

    Args:
        setting: key and value, for the message.
        parts: the parts that the setting names.
        names: the tensors' names.

    Raises:
        UserError: a part contains none; the message suggests the nearest part.
    """
    existing = prefixes(names)
    for part in parts:
        if part not in existing:
            near = suggest(part, existing) or f" The parts are {join_first(existing)}."
            raise UserError(f"{setting}: no part is named {part}.{near}")
