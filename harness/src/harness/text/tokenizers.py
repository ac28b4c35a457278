"""Texts to numbers and back: bytes, which need no library, or a tokenizer of ``tokenizers``.

Each has one more number beside its own, or one of its own, which stands before and after a text
and fills up what is padded: ``end_id``.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import UserError

CHUNK_CHARACTERS = 2**15  # that one thread encodes at a time
BYTES = {"kind": "bytes"}


class Tokenizer(ABC):
    """Encodes and decodes.

    Attributes:
        vocab_size: token ids are from 0 to ``vocab_size - 1``.
        end_id: begins, ends and pads a text.
        fact: plain values that ``tokenizer_of`` makes the same tokenizer of.
        identity: a text that is another one for a tokenizer that encodes otherwise.
    """

    vocab_size: int
    end_id: int
    fact: dict[str, Any]
    identity: str

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The smallest type for the ids of texts, which hold no ``end_id`` of our own."""
        most = self.vocab_size - (2 if self.end_id == self.vocab_size - 1 else 1)
        return np.uint8 if most < 2**8 else np.uint16 if most < 2**16 else np.uint32

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of one text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""

    @abstractmethod
    def corpus(self, piece: bytes) -> NDArray[Any]:
        """The ids of a piece of a long text.

        Raises:
            UnicodeDecodeError: if it needs UTF-8, and some bytes are none.
        """

    @abstractmethod
    def lines(self, piece: bytes) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids of all lines of a piece, and how many each line has; see ``corpus``."""


class Bytes(Tokenizer):
    """Each byte is a token: any file can be read, and no library is needed."""

    vocab_size, end_id, fact, identity = 257, 256, BYTES, "bytes"

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return bytes(i for i in ids if i < self.end_id).decode(errors="replace")

    def corpus(self, piece: bytes) -> NDArray[Any]:
        """See ``Tokenizer``; nothing is decoded, so that there are no errors."""
        return np.frombuffer(piece, np.uint8)

    def lines(self, piece: bytes) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See ``Tokenizer``."""
        data = np.frombuffer(piece if piece.endswith(b"\n") else piece + b"\n", np.uint8)
        is_end = data == ord("\n")
        is_return = data == ord("\r")
        is_return[:-1] &= is_end[1:]  # "\r\n" ends a line as well
        is_text = ~(is_end | is_return)
        return data[is_text], np.diff(np.cumsum(is_text)[is_end], prepend=0)


class OfLibrary(Tokenizer):
    """A tokenizer of the library ``tokenizers``.

    Args:
        json: the text of a ``tokenizer.json``.
        end_token: the token of it that ends a text; ``None`` adds an id for that.
    """

    def __init__(self, json: str, end_token: str | None = None) -> None:
        # It starts threads, and warns of the forks that come afterwards, which do not use it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        self.tokenizer = library().Tokenizer.from_str(json)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        if end_token is None:
            self.end_id = self.vocab_size
            self.vocab_size += 1
        elif end_token not in ids:
            named = [token for token in ids if token[:1] + token[-1:] in ("<>", "[]")]
            raise UserError(
                f"data.end_token={end_token} is no token of data.tokenizer.\n"
                f"It has {', '.join(sorted(named)[:8]) or 'none that looks like it'}; "
                "data.end_token=null adds one."
            )
        else:
            self.end_id = ids[end_token]
        self.fact = {"kind": "tokenizers", "end_token": end_token, "json": json}
        self.identity = f"{hashlib.sha256(json.encode()).hexdigest()} {end_token}"

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        text: str = self.tokenizer.decode([i for i in ids if i != self.end_id])
        return text

    def corpus(self, piece: bytes) -> NDArray[Any]:
        """See ``Tokenizer``."""
        text, chunks, start = piece.decode(), [], 0
        while start < len(text):
            end = text.find("\n", start + CHUNK_CHARACTERS) + 1 or len(text)
            chunks.append(text[start:end])
            start = end
        return np.concatenate(self._encoded(chunks))

    def lines(self, piece: bytes) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See ``Tokenizer``."""
        texts = piece.decode().removesuffix("\n").split("\n")
        found = self._encoded([text.removesuffix("\r") for text in texts])
        return np.concatenate(found), np.array([len(ids) for ids in found], np.int64)

    def _encoded(self, texts: list[str]) -> list[NDArray[Any]]:
        found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in found]


def tokenizer_of(fact: dict[str, Any]) -> Tokenizer:
    """The tokenizer that a run has learnt with, of its fact ``tokenizer``."""
    return Bytes() if fact == BYTES else OfLibrary(fact["json"], fact["end_token"])


def read(name: str, end_token: str | None) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``.

    Raises:
        UserError: if there is none, it is none, or the library is missing.
    """
    library()
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"data.tokenizer={name} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"data.tokenizer={name} is no tokenizer.json: it is no text.") from error
    try:
        return OfLibrary(text, end_token)
    except UserError:
        raise
    except Exception as error:  # the library's own kind is Exception
        raise UserError(
            f"data.tokenizer={name} is no tokenizer.json of the library tokenizers: {error}.\n"
            "Use data.tokenizer=bytes, which needs none."
        ) from error


def library() -> Any:
    """The library, which is asked for only where a tokenizer of it is."""
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "data.tokenizer needs the library tokenizers: pip install -e .[text]\n"
            "Or use data.tokenizer=bytes, which needs none."
        ) from error
    return tokenizers
