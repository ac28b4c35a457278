"""The settings below ``init``: which weights a run starts from, and which parts it freezes.

In: a mapping of plain values. Out: a checked ``Init``. Next: ``weights`` and ``freezing``.
Imports no torch, so that mistakes are answered before a run has a folder.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from harness.convert.checkpoint import is_checkpoint_folder
from harness.errors import UserError
from harness.names import as_names, did_you_mean

# The weights in the folder of a run, and in one of Hugging Face.
IN_FOLDERS = (
    "checkpoints/best.ckpt",
    "checkpoints/last.ckpt",
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
)


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
    """Read what is set below ``init``; ``None`` is unset. The command's rules check the types.

    Raises:
        UserError: with what to type instead.
    """
    if not isinstance(node, Mapping | None):
        raise UserError(f"init has keys in a YAML file: write init: {{path: {node}}} there.")
    values = {name: value for name, value in (node or {}).items() if value is not None}
    keys = [each.name for each in fields(Init)]
    for name in values:
        if name not in keys:
            raise UserError(f"There is no key init.{name}.{did_you_mean(name, keys, 'init.')}")
    for name in {"path", "key", "prefix"} & values.keys():
        values[name] = str(values[name])
    for name in {"leave_out", "freeze"} & values.keys():
        values[name] = tuple(map(str, as_names(values[name])))
    names = values.get("rename", {})
    if not isinstance(names, Mapping):
        raise UserError(f"init.rename={names} must be pairs, such as init.rename={{fc: head}}.")
    values["rename"] = {str(old): str(new or "") for old, new in names.items()}
    if "unfreeze_at_epoch" in values and not values.get("freeze"):
        raise UserError("init.unfreeze_at_epoch needs init.freeze=[<part>]: nothing is frozen.")
    return Init(**values)


def file_of(path: str) -> Path:
    """Return the checkpoint that a path stands for; of a run's folder its best one.

    Raises:
        UserError: if there is none.
    """
    given = Path(path).expanduser()
    if not given.exists():
        siblings = os.listdir(given.parent) if given.parent.is_dir() else []
        folder = "" if given == Path(given.name) else f"{given.parent}/"
        hint = did_you_mean(given.name, sorted(siblings), folder)
        raise UserError(f"init.path={path}: there is no such file or folder.{hint}")
    if not given.is_dir() or is_checkpoint_folder(given):
        return given
    for name in IN_FOLDERS:
        if (given / name).is_file():
            return given / name
    raise UserError(
        f"init.path={path} is a folder, neither of a run with a checkpoint nor of weights.\n"
        f"Name the file, as in init={given / 'weights.safetensors'}."
    )
