"""The images below one folder: found, told, and decoded once."""

import logging
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.data.datamodule import tell
from harness.errors import UserError
from harness.images.cache import Packed, packed
from harness.images.dataset import FilePixels, PackedPixels
from harness.images.finding import Files, find_files, listed

log = logging.getLogger(__name__)


class Source:
    """Images of a folder, whose files count by their position among their names.

    Args:
        root: the folder.
        key: the setting that it comes from, for messages.
        cache_dir: of packed images.
        shape: of each of these, (side, side, channels).
        keeps_pixels: whether they are kept; without, each use decodes the files.
        skips: whether files that cannot be decoded are left out; else they are refused.
    """

    def __init__(
        self,
        root: str,
        key: str,
        *,
        cache_dir: Path,
        shape: tuple[int, int, int],
        keeps_pixels: bool,
        skips: bool,
    ) -> None:
        self.root, self.key = root, key
        self.cache_dir, self.shape = cache_dir, shape
        self.keeps_pixels, self.skips = keeps_pixels, skips

    @cached_property
    def files(self) -> Files:
        """All files that may be images."""
        return find_files(self.root, self.key)

    def tell_files(self, kind: str = "") -> None:
        """Say how many there are, and what else lies in the folder."""
        tell(f"{self.key}={self.root}: {len(self.files.names):,} images{kind}")
        if left_out := self.files.left_out:
            tell(f"  left out: {listed(f'{num:,} {what}' for what, num in left_out.items())}")

    @cached_property
    def packed(self) -> Packed:
        """What decoding has found, now or in an earlier run.

        Raises:
            UserError: if files cannot be decoded and are to be refused, or none can be.
        """
        side, _, channels = self.shape
        found = packed(self.files, self.cache_dir, side, channels, keeps_pixels=self.keeps_pixels)
        if not found.unreadable:
            return found
        reasons = [f"{self.files.names[i]}: {text}" for i, text in found.unreadable.items()]
        num, num_files = len(reasons), len(self.files.names)
        said = f"{num:,} of {num_files:,} files below {self.key}={self.root} cannot be read"
        if not self.skips or num == num_files:
            raise UserError(
                f"{said}: {listed(reasons, 5)}.\n"
                "Repair or remove them, or leave them out with data.unreadable=skip."
            )
        tell(f"  {said}, and are skipped: {listed(reasons, 5)}")
        for text in reasons:
            log.info("skipped %s", listed([text]))
        return found

    @property
    def readable(self) -> NDArray[np.int64]:
        """Positions of the files that can be decoded."""
        return np.delete(np.arange(len(self.files.names)), list(self.packed.unreadable))

    @property
    def pixels(self) -> PackedPixels | FilePixels:
        """Where the images are read from."""
        if self.packed.path is None:
            return FilePixels(self.files.root, self.files.names, self.shape)
        return PackedPixels(self.packed.path, self.shape)
