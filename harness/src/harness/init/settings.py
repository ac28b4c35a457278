"""The settings below ``init``, and the names of parts of a module that they have.

In: what a config holds. Out: a checked ``Init``. Next: ``weights`` and ``freezing``.
Imports no torch, so that mistakes are answered before a run has a folder.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.errors import UserError
from harness.names import as_names, did_you_mean, few


@dataclass(frozen=True)
class Init:
    """The settings below ``init``; names of parts are those of the module, ``net.backbone``."""

    path: str | None = None  # a checkpoint, or a folder of one or of a run; None: fresh weights
    key: str | None = None  # this and the next two choose among the file's weights: see convert
    prefix: str = "auto"
    ema: bool = True
    rename: Mapping[str, str] = field(default_factory=dict)  # beginnings of the file's names
    strict: bool = True  # refuse a file that does not fit as a whole
    leave_out: tuple[str, ...] = ()  # parts that keep their fresh start
    freeze: tuple[str, ...] = ()  # parts that are not trained
    unfreeze_at_epoch: int | None = None  # counted from 0


def settings(node: Any) -> Init:
    """Read what is set below ``init``, also in a config; ``None`` is unset.

    The command's rules check the types.

    Raises:
        UserError: with what to type instead.
    """
    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    values = {name: value for name, value in (plain or {}).items() if value is not None}
    keys = [each.name for each in fields(Init)]
    for name in values:
        if name not in keys:
            raise UserError(f"There is no key init.{name}.{did_you_mean(name, keys, 'init.')}")
    values |= {name: str(values[name]) for name in {"path", "key", "prefix"} & values.keys()}
    for name in {"leave_out", "freeze"} & values.keys():
        values[name] = tuple(map(str, as_names(values[name])))
    if not isinstance(names := values.get("rename", {}), Mapping):
        raise UserError(f"init.rename={names} must be pairs, such as init.rename={{fc:head}}.")
    values["rename"] = {str(old): str(new or "") for old, new in names.items()}
    if "unfreeze_at_epoch" in values and not values.get("freeze"):
        raise UserError("init.unfreeze_at_epoch needs init.freeze=[<part>]: nothing is frozen.")
    return Init(**values)


def check_file(path: str) -> None:
    """Refuse a path that stands for no checkpoint.

    Raises:
        UserError: with what to name instead.
    """
    from harness.convert.checkpoint import whole  # for init.path alone

    try:
        whole(Path(path).expanduser())
    except UserError as error:
        raise UserError(f"init.path={str(error).removesuffix('.')}.") from error


def bare(name: str) -> str:
    """Return a tensor's name without those of wrappers, such as that of ``torch.compile``."""
    from harness.convert.choose import WRAPPERS  # here: settings are read before a run's folder

    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def prefixes(names: Iterable[str]) -> dict[str, None]:
    """Return the names and all parts that they are in, outer ones first, each once."""
    pieces = [name.split(".") for name in names]
    return {".".join(each[:depth]): None for each in pieces for depth in range(1, len(each) + 1)}


def check_parts(setting: str, parts: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a setting that names parts to which none of the names of tensors belongs.

    Raises:
        UserError: with the nearest part that there is.
    """
    existing = prefixes(names)
    for part in parts:
        if part not in existing:
            near = did_you_mean(part, existing) or f" There is {few(existing)}."
            raise UserError(f"{setting}: there is no {part}.{near}")
