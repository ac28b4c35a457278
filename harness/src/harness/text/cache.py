"""Token ids of texts in files that are mapped into memory: encoded once, whoever asks.

See ``harness.data.caching`` for what several processes, and a killed one, leave.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.data.caching import cached, file_signature, hashed
from harness.errors import UserError
from harness.files import sync
from harness.text.reading import Source, pieces
from harness.text.tokenizers import Tokenizer

VERSION = 2  # of what the files hold; another one is encoded again
SECONDS_BETWEEN_REPORTS = 5.0


class Tokens:
    """The token ids of a text.

    Attributes:
        ids: shape (num_tokens,), mapped from a file.
        ends: where each line ends in ``ids``, shape (num_lines,); ``None`` for a corpus.
        num_bytes: of the text.
        files: by which a data set tells a run that goes on whether it is the same text.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, [folder / "ids", folder / "ends"]
        found = json.loads((folder / "about.json").read_text())
        self.num_bytes: int = found["num_bytes"]
        self.ids = self._mapped("ids", found["dtype"])
        self.ends = self._mapped("ends", "int64") if found["unit"] == "lines" else None

    @property
    def num_labels(self) -> int:
        """Tokens that are predicted, the one that ends each line among them."""
        return len(self.ids) + (0 if self.ends is None else len(self.ends))

    def _mapped(self, name: str, dtype: str) -> NDArray[Any]:
        path = self.folder / name
        # A text of empty lines has no ids, and nothing cannot be mapped. Plain arrays are read
        # faster than np.memmap's own kind.
        mapped = np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
        return np.asarray(mapped)

    def __reduce__(self) -> tuple[type["Tokens"], tuple[Path]]:
        return Tokens, (self.folder,)  # a data worker maps the files itself


def tokens_of(source: Source, tokenizer: Tokenizer, unit: str, cache_dir: str | Path) -> Tokens:
    """Encode a text, or take what was encoded before.

    Args:
        source: the text.
        tokenizer: encodes it.
        unit: ``"lines"`` encodes each line by itself.
        cache_dir: the folder of the cache.

    Raises:
        UserError: if the text or the cache cannot be read or written.
    """
    counts = [VERSION, *file_signature(source.path), source.start, source.end, unit]
    folder = Path(cache_dir, f"text_{hashed([*counts, tokenizer.identity, sys.byteorder])}")

    def write(part: Path) -> None:
        part.mkdir()
        _write(part, source, tokenizer, unit)

    return Tokens(cached(folder, write))


def _write(folder: Path, source: Source, tokenizer: Tokenizer, unit: str) -> None:
    """Encode a text into the files of a folder, in memory that does not grow with it."""
    num_tokens, num_read, num_lines = 0, 0, 0
    started = reported = time.monotonic()
    with (folder / "ids").open("wb") as ids, (folder / "ends").open("wb") as ends:
        for piece in pieces(source, cuts_lines=unit == "corpus"):
            try:
                if unit == "lines":
                    found, counts = tokenizer.lines(piece)
                    ends.write((np.cumsum(counts) + num_tokens).data)
                else:
                    found = tokenizer.corpus(piece)
            except UnicodeDecodeError as error:
                line = _lines_before(source) + num_lines + piece.count(b"\n", 0, error.start) + 1
                raise UserError(
                    f"{source.key}={source.path}, line {line}: {error.reason}, so this is no "
                    "UTF-8.\nSave the file in UTF-8, or use data.tokenizer=bytes, which takes "
                    "any bytes."
                ) from error
            ids.write(np.ascontiguousarray(found).data)
            num_tokens += len(found)
            num_lines += piece.count(b"\n")
            num_read += len(piece)
            if (now := time.monotonic()) - reported > SECONDS_BETWEEN_REPORTS:
                reported, size = now, source.end - source.start
                speed = num_read / 1e6 / (now - started)
                print(
                    f"{source.path.name}: {num_read / size:.0%} encoded, {speed:.1f} MB/s, "
                    f"{num_tokens * found.itemsize / 1e6:.0f} MB in {folder.parent}",
                    file=sys.stderr,
                    flush=True,
                )
        for file in (ids, ends):
            file.flush()
            os.fsync(file.fileno())
    about = {"num_bytes": num_read, "dtype": np.dtype(tokenizer.dtype).name, "unit": unit}
    (folder / "about.json").write_text(json.dumps(about))
    sync(folder / "about.json")
    sync(folder)


def _lines_before(source: Source) -> int:
    """Lines of the file before a source."""
    before = source._replace(start=0, end=source.start)
    return sum(piece.count(b"\n") for piece in pieces(before, cuts_lines=True))
