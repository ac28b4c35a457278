"""Texts as token ids: bytes, which need no library, or a ``tokenizer.json`` of ``tokenizers``."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness import UserError, cached

MEGABYTE = 2**20


class Tokenizer:
    """Encode and decode texts.

    Args:
        text: what a ``tokenizer.json`` holds; ``None`` makes each byte a token.
        end_token: the token of it that ends a text; ``None`` adds an id for that.

    Attributes:
        vocab_size: ids are from 0 to ``vocab_size - 1``.
        end_id: begins, ends and pads a text.
    """

    def __init__(self, text: str | None = None, end_token: str | None = None) -> None:
        self.json, self.end_token, self.library = text, end_token, None
        self.end_id = 256
        if text is not None:
            # It starts threads, and warns of the forks that come afterwards, which do not use it.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
            import tokenizers

            self.library = tokenizers.Tokenizer.from_str(text)
            self.library.no_padding()
            self.library.no_truncation()
            ids = self.library.get_vocab(with_added_tokens=True)
            if end_token is not None and end_token not in ids:
                raise UserError(f"data.end_token={end_token} is no token of data.tokenizer.")
            self.end_id = max(ids.values()) + 1 if end_token is None else ids[end_token]
            self.vocab_size = max(self.end_id, *ids.values()) + 1
        else:
            self.vocab_size = self.end_id + 1

    @classmethod
    def read(cls, name: str, end_token: str | None) -> "Tokenizer":
        """Make the tokenizer that ``data.tokenizer`` names: ``"bytes"``, or a file."""
        if name == "bytes":
            return cls()
        try:
            return cls(Path(name).read_text(encoding="utf-8"), end_token)
        except ImportError as error:
            raise UserError(
                f"data.tokenizer={name} needs the library tokenizers: pip install -e .[text]"
            ) from error
        except UserError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"data.tokenizer={name} is no tokenizer.json: {error}") from error

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Encode texts, each to ids of shape (num_tokens,)."""
        if self.library is None:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        found = self.library.encode_batch_fast([*texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, up to the one that ends a text."""
        ids = list(ids)
        ids = ids[: ids.index(self.end_id)] if self.end_id in ids else ids
        if self.library is None:
            return bytes(ids).decode(errors="replace")
        text: str = self.library.decode(ids)
        return text


def pieces(path: Path) -> Iterator[str]:
    """Read a text in pieces of about a megabyte that end with a line."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        while lines := file.readlines(MEGABYTE):
            yield "".join(lines)


def encoded(
    path: Path, tokenizer: Tokenizer, by_line: bool, cache_dir: Path
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Encode a text file once; later calls map what is in the cache.

    Args:
        path: the file, in UTF-8.
        tokenizer: encodes it.
        by_line: encode each line by itself, without its end.
        cache_dir: the folder of the cache.

    Returns:
        All ids, and where each line, or piece, ends in them.
    """

    def write(folder: Path) -> None:
        folder.mkdir()
        ids, ends = list[NDArray[Any]](), list[int]()
        for piece in pieces(path):
            for one in tokenizer.encode(piece.splitlines() if by_line else [piece]):
                ids.append(one)
                ends.append(len(one))
        np.save(folder / "ids.npy", np.concatenate(ids) if ids else np.empty(0, np.uint8))
        np.save(folder / "ends.npy", np.cumsum(ends, dtype=np.int64))

    try:
        status = path.stat()
        counts = [str(path.resolve()), status.st_size, status.st_mtime_ns, by_line, tokenizer.json]
        key = hashlib.sha256(json.dumps(counts).encode()).hexdigest()[:16]
        folder = cached(cache_dir / f"{path.stem}-{key}", write)
    except OSError as error:
        raise UserError(f"data.file={path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"data.file={path} is no text in UTF-8: {error.reason}.") from error
    ids, ends = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("ids", "ends"))
    return np.asarray(ids), np.asarray(ends)
