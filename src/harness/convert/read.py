"""Open a checkpoint of any format, and know whether it changed while it was read."""

import os
import stat
from pathlib import Path
from typing import Any

from .dcp import read_dcp
from .formats import Window, read_legacy, read_safetensors, read_zip
from .tensors import CheckpointError, parsing

_IDENTITY = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
_DEEPSPEED = "a DeepSpeed folder; run its zero_to_fp32.py and convert the file which that writes"


def is_checkpoint_folder(path: Path) -> bool:
    """Whether a folder as a whole is one checkpoint, be it of a kind that is refused."""
    has_index = (path / ".metadata").is_file() or (path / "latest").is_file()
    return has_index or any(path.glob("*zero_pp_rank*"))


class Checkpoint:
    """An opened checkpoint; a context manager that closes its files.

    Attributes:
        kind: the format, in words.
        root: what was saved, with Tensors and Inerts in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[Path, tuple[int, os.stat_result]] = {}
        try:
            with parsing("it"):
                self.kind, self.root = self._read()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        for fd, _stat in self._files.values():
            os.close(fd)

    def open(self, path: Path) -> Window:
        """Open a file once: all reads go through this descriptor, whatever the path becomes."""
        if path not in self._files:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
            self._files[path] = fd, os.fstat(fd)
        fd, status = self._files[path]
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path.name} is not a regular file")
        return Window(fd, 0, status.st_size)

    def check_unchanged(self) -> None:
        """Raise if a file was written to or replaced since it was opened."""
        for path, (fd, before) in self._files.items():
            for now in (os.fstat(fd), os.stat(path)):
                if any(getattr(now, name) != getattr(before, name) for name in _IDENTITY):
                    raise CheckpointError("changed while it was read; convert it again")

    def _read(self) -> tuple[str, Any]:
        if self.path.is_dir():
            return self._read_folder()
        window = self.open(self.path)
        head = os.pread(window.fd, 16, 0)
        if not window.size:
            raise CheckpointError("the file is empty; its copy or its training was interrupted")
        # Before the others: a safetensors file begins with a length, which can be any bytes.
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= window.size:
            return "safetensors", read_safetensors(window)
        if head.startswith(b"PK\x03\x04"):
            return "torch.save", read_zip(window)
        if head.startswith(b"\x80"):
            return "torch.save (legacy)", read_legacy(window)
        raise CheckpointError("not a checkpoint: neither torch.save's format nor safetensors")

    def _read_folder(self) -> tuple[str, Any]:
        if (self.path / ".metadata").is_file():
            rest = self.path / "meta.pt"  # where Lightning keeps what is not a tensor
            entries = read_zip(self.open(rest)) if rest.is_file() else {}
            return "torch.distributed.checkpoint", {**entries, **read_dcp(self.path, self.open)}
        if is_checkpoint_folder(self.path):
            raise CheckpointError(_DEEPSPEED)
        raise CheckpointError("a folder without checkpoints: no .metadata, no checkpoint files")
