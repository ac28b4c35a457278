"""``init`` of a command: which weights a run starts from, and what it freezes.

Imports no torch: mistakes are answered before a run has a folder.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from harness.convert.checkpoint import is_checkpoint_folder
from harness.errors import UserError
from harness.names import did_you_mean

AUTO = "auto"
# What a folder that is no checkpoint itself may hold: that of a run, and of Hugging Face.
IN_FOLDERS = (
    "checkpoints/best.ckpt",
    "checkpoints/last.ckpt",
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin",
)


@dataclass(frozen=True)
class Init:
    """The settings below ``init``.

    Attributes:
        path: a checkpoint, or the folder of a run or of one; ``None`` starts from fresh weights.
        key: the entry of the file to take; see ``convert``.
        prefix: the part of the file's weights to take.
        ema: prefer averaged weights.
        into: the part of the module that takes them, ``""`` for the whole; ``auto`` finds it.
        map: beginnings of the file's names, and what they are called here.
        strict: refuse what does not fit.
        leave_out: parts of the module, or of the file, that are not taken.
        freeze: parts of the module that are not trained.
        unfreeze_at_epoch: the epoch, counted from 0, from which on they are.
    """

    path: str | None = None
    key: str | None = None
    prefix: str = AUTO
    ema: bool = True
    into: str = AUTO
    map: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True
    leave_out: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    unfreeze_at_epoch: int | None = None


def settings(node: Any) -> Init:
    """Read and check what is set below ``init``.

    Args:
        node: plain values; ``None`` where the config is of before there was an ``init``.

    Raises:
        UserError: with what to type instead.
    """
    if node is None:
        return Init()
    if not isinstance(node, Mapping):
        raise UserError(
            f"init: {node} stands in a YAML file, where init has keys.\n"
            f"Write init: {{path: {node}}} there."
        )
    known = [each.name for each in fields(Init)]
    for name in map(str, node):
        if name not in known:
            raise UserError(f"There is no key init.{name}.{did_you_mean(name, known, 'init.')}")
    values = {str(name): value for name, value in node.items()}
    for name in ("path", "key"):
        if values.get(name) is not None:
            values[name] = _text(name, values[name])
    for name in ("prefix", "into"):
        if name in values:
            values[name] = _text(name, values[name] or "").strip(".")
    for name in ("leave_out", "freeze"):
        if name in values:
            given = values[name] or ()
            parts = [given] if isinstance(given, str) else given
            if not isinstance(parts, (list, tuple)) or not all(map(_is_name, parts)):
                raise UserError(f"init.{name}={given} must be a list: init.{name}=[net.head].")
            values[name] = tuple(part.strip(".") for part in parts)
    if "map" in values:
        values["map"] = _map(values["map"] or {})
    for name in ("ema", "strict"):
        if not isinstance(values.get(name, True), bool):
            raise UserError(f"init.{name}={values[name]}: use true or false.")
    epoch = values.get("unfreeze_at_epoch")
    if epoch is not None and (type(epoch) is not int or epoch < 1):
        raise UserError(f"init.unfreeze_at_epoch={epoch} must be a whole number, 1 or more.")
    if epoch is not None and not values.get("freeze"):
        raise UserError(
            f"init.unfreeze_at_epoch={epoch}, and nothing is frozen.\n"
            "Name the parts: init.freeze=[net.backbone]."
        )
    return Init(**values)


def file_of(path: str) -> Path:
    """The checkpoint that a path stands for; of a run's folder its best one.

    Raises:
        UserError: if there is none.
    """
    given = Path(path).expanduser()
    if not given.exists():
        there = sorted(os.listdir(given.parent)) if given.parent.is_dir() else []
        hint = did_you_mean(
            given.name, there, "" if given == Path(given.name) else f"{given.parent}/"
        )
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


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip("."))


def _text(name: str, value: Any) -> str:
    if isinstance(value, (bool, Mapping, list)):
        raise UserError(f"init.{name}={value} must be text.")
    return str(value)


def _map(given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise UserError(f"init.map={given} must give names for names: init.map={{fc: head}}.")
    names = {str(old).strip("."): _text("map", new or "").strip(".") for old, new in given.items()}
    if len(names) < len(given):
        raise UserError(f"init.map={dict(given)} names something twice.")
    return names
