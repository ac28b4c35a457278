"""List a run's checkpoints, verify their checksums, and remove old ones.

This file imports no torch, so a command finds its checkpoint before torch is imported.
"""

import os
import re
import zipfile
import zlib
from pathlib import Path

from harness.errors import UserError
from harness.files import PARTIAL

NEWEST = "last.ckpt"  # a link to the newest checkpoint
END_RECORD = 22  # bytes of a zip file's last record, which torch writes without a comment


def damage(path: Path) -> str | None:
    """Return why a checkpoint is damaged, or ``None`` if it is intact.

    ``torch.load`` does not notice a flipped bit, and builds every object that a file describes,
    such as gigabytes of compressed zeros. The converter reads a file as data, in limited memory.
    """
    from harness.convert.checkpoint import Checkpoint
    from harness.convert.tensors import CheckpointError

    try:
        with path.open("rb") as file:
            file.seek(-min(END_RECORD, file.seek(0, os.SEEK_END)), os.SEEK_END)
            end = file.read()
            if len(end) < END_RECORD or not (end.startswith(b"PK\5\6") and end.endswith(b"\0\0")):
                return "it is cut off, or has bytes after its end"
            # Allow more objects than usual: a checkpoint may have long histories of numbers.
            with Checkpoint(path, allowance=12_000_000 + 8 * file.tell()) as opened:
                opened.check_size()
            with zipfile.ZipFile(file) as archive:
                # torch.serialization.set_crc32_options(False) leaves every checksum zero.
                has_checksums = any(member.CRC for member in archive.infolist())
                member = archive.testzip() if has_checksums else None
    except CheckpointError as error:
        return str(error)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError) as error:
        return str(error)  # a RuntimeError means flags that only damage can set
    return f"{member} does not match its checksum" if member else None


def verified(path: Path) -> Path:
    """Return the same path, or raise a ``UserError`` if the checkpoint is damaged."""
    if reason := damage(path):
        raise UserError(
            f"checkpoint={path} is not a checkpoint, or is damaged ({reason}).\n"
            "Use another checkpoint of the run, such as last.ckpt."
        )
    return path


def path_of(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step_{step}.ckpt"


def by_step(folder: Path) -> list[Path]:
    """Return the checkpoints that a run can resume from, the newest last."""
    paths = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+\.ckpt", path.name)]
    return sorted(paths, key=lambda path: int(path.stem.removeprefix("step_")))


def link_newest(path: Path) -> None:
    """Link ``last.ckpt`` to ``path``, which is in the same folder."""
    link(path.with_name(NEWEST), path.name)


def link(path: Path, target: str) -> None:
    """Link ``path`` to another file of its folder; replace an old link atomically."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    partial.replace(path)


def remove_old(folder: Path, num_kept: int) -> None:
    """Remove all but the newest ``num_kept`` checkpoints. Call it when the newest is safe."""
    for path in by_step(folder)[:-num_kept]:
        path.unlink(missing_ok=True)


def set_aside_newer(path: Path) -> None:
    """Rename the damaged checkpoints that are newer than ``path`` to ``*.damaged``."""
    paths = by_step(path.parent)
    for newer in paths[paths.index(path) + 1 :]:
        newer.replace(newer.with_name(newer.name + ".damaged"))
