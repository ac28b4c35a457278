"""Encode texts as token ids: bytes, or the tokens of a ``tokenizer.json``.

In: a text file. Out: its token ids, encoded once into a cache and mapped. Next: text.py.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness import UserError, cached

MEGABYTE = 2**20  # of text to encode at once


class Tokenizer:
    """Encode and decode texts.

    Args:
        text: the content of a ``tokenizer.json``; ``None`` makes each byte a token.

    Attributes:
        end_id: the id after those of all tokens, which begins, ends and pads a text.
        vocab_size: the number of ids, from 0 to ``vocab_size - 1``.
    """

    def __init__(self, text: str | None = None) -> None:
        self.text, self.library, self.end_id = text, None, 256
        if text is not None:
            # The package starts threads, and would warn of later forks, which do not use threads.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
            import tokenizers

            self.library = tokenizers.Tokenizer.from_str(text)
            self.library.no_padding()
            self.library.no_truncation()
            self.end_id = max(self.library.get_vocab(with_added_tokens=True).values()) + 1
        self.vocab_size = self.end_id + 1

    @classmethod
    def read(cls, name: str) -> "Tokenizer":
        """Make the tokenizer that ``data.tokenizer`` names: ``"bytes"``, or a file."""
        try:
            return cls(None if name == "bytes" else Path(name).read_text(encoding="utf-8"))
        except ImportError as error:
            raise UserError(
                f"data.tokenizer={name} needs the package tokenizers: pip install -e '.[text]'"
            ) from error
        except Exception as error:  # tokenizers raises no narrower class
            raise UserError(f"data.tokenizer={name} is not a tokenizer.json: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Encode texts, each to ids of shape (num_tokens,)."""
        if self.library is None:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        encodings = self.library.encode_batch_fast([*texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids up to the first ``end_id``."""
        ids = list(ids)
        ids = ids[: ids.index(self.end_id)] if self.end_id in ids else ids
        if self.library is None:
            return bytes(ids).decode(errors="replace")
        text: str = self.library.decode(ids)
        return text


def encode_file(
    key: str, path: Path, tokenizer: Tokenizer, by_line: bool, cache_dir: Path
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Encode a text file in UTF-8 once; later calls map the cached ids.

    ``key`` is the key below ``data`` that names the file, for messages. With ``by_line`` each line
    is encoded separately, without its line break; otherwise each megabyte of text.

    Returns:
        All token ids, and the index after the last token of each line or megabyte.
    """

    def write(folder: Path) -> None:
        folder.mkdir()
        ids = list[NDArray[Any]]()
        with path.open(encoding="utf-8-sig", newline="") as file:
            while lines := file.readlines(MEGABYTE):
                texts = [line.rstrip("\r\n") for line in lines] if by_line else ["".join(lines)]
                ids += tokenizer.encode(texts)
        np.save(folder / "ids.npy", np.concatenate(ids) if ids else np.empty(0, np.uint8))
        np.save(folder / "ends.npy", np.cumsum([len(part) for part in ids], dtype=np.int64))

    try:
        status = path.stat()
        settings = [
            str(path.resolve()),
            status.st_size,
            status.st_mtime_ns,
            by_line,
            tokenizer.text,
        ]
        name = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
        folder = cached(cache_dir / f"{path.stem}-{name}", write)
    except OSError as error:
        raise UserError(
            f"data.{key}={path} cannot be read: {error.strerror}.\n"
            f"Name a text file: data.{key}=<file>"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.{key}={path} is not text in UTF-8: {error.reason}.\nConvert the file to UTF-8."
        ) from error
    ids, ends = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("ids", "ends"))
    if not len(ids):
        raise UserError(f"data.{key}={path} is empty. Name a file with text: data.{key}=<file>")
    return np.asarray(ids), np.asarray(ends)
