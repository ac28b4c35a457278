"""A text is encoded once, by one process; what was killed is done again, and no room is told."""

import errno
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harness import UserError
from harness.data import caching
from harness.text import cache, reading
from harness.text.cache import Tokens, tokens_of
from harness.text.reading import whole
from harness.text.tokenizers import Bytes, OfLibrary

TEXT = "".join(f"line {i}, größer\n" for i in range(500)).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 100)


def tokens(path: Path, unit: str = "corpus", tokenizer=None) -> Tokens:
    source = whole("data.file", str(path))
    return tokens_of(source, tokenizer or Bytes(), unit, path.parent / "cache")


def slow(path: Path, seconds: float, done) -> None:
    """Encode as a process of its own, and take that long."""
    encode = Bytes.corpus

    def corpus(self, piece: bytes):
        done.put("began")
        time.sleep(seconds)
        return encode(self, piece)

    Bytes.corpus = corpus
    done.put(len(tokens(path).ids))


def test_tokens_are_the_text_in_whatever_pieces(path: Path, small_pieces) -> None:
    assert tokens(path).ids.tobytes() == TEXT
    lines = tokens(path, "lines")
    assert lines.ids.tobytes() == TEXT.replace(b"\n", b"")
    assert len(lines.ends) == 500
    assert lines.num_labels == len(TEXT)


def test_no_character_is_cut_in_a_line_longer_than_a_piece(tmp_path: Path, small_pieces) -> None:
    path = tmp_path / "text.txt"
    for text in ("a" * 1000, "ü" * 500, "die süße Größe " * 50, "x" + "€" * 300):
        path.write_text(text, encoding="utf-8")
        source = whole("data.file", str(path))
        found = list(reading.pieces(source, cuts_lines=True))
        assert len(found) > 5
        assert "".join(piece.decode() for piece in found) == text
        assert len(list(reading.pieces(source, cuts_lines=False))) == 1


def test_a_tokenizer_of_the_library_gives_the_text_back(path: Path, small_pieces) -> None:
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=299, initial_alphabet=alphabet, show_progress=False)
    pairs.train_from_iterator(TEXT.decode().splitlines(keepends=True), trainer)
    tokenizer = OfLibrary(pairs.to_str())
    assert tokenizer.vocab_size == 300
    found = tokens(path, tokenizer=tokenizer)
    assert tokenizer.decode(found.ids.tolist()) == TEXT.decode()
    assert found.ids.dtype == np.uint16
    assert len(found.ids) < len(TEXT) / 2
    lines = tokens(path, "lines", tokenizer)
    assert tokenizer.decode(lines.ids[: lines.ends[0]].tolist()) == "line 0, größer"


def test_text_is_encoded_once_and_again_when_it_has_changed(path: Path, monkeypatch) -> None:
    first = tokens(path).folder
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_write", None)  # would fail
        patch.setattr(caching, "locked", None)  # as where nothing can be written
        assert tokens(path).folder == first
    path.write_bytes(TEXT + b"more")
    assert tokens(path).ids.tobytes() == TEXT + b"more"
    status = path.stat()
    path.write_bytes(TEXT + b"MORE")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert tokens(path).ids.tobytes() == TEXT + b"MORE"


def test_one_process_encodes_and_the_others_wait(path: Path) -> None:
    done = multiprocessing.Queue()
    started = [multiprocessing.Process(target=slow, args=(path, 0.5, done)) for _ in range(3)]
    for process in started:
        process.start()
    said = [done.get(timeout=60) for _ in range(4)]
    assert sorted(map(str, said)) == sorted(["began", *[str(len(TEXT))] * 3])


def test_cache_that_cannot_be_written_is_told_and_left_clean(path: Path, monkeypatch) -> None:
    for number, message in ((errno.ENOSPC, "has no room"), (errno.EROFS, "cannot be written")):

        def fail(*_: object, number: int = number) -> None:
            raise OSError(number, "Read-only file system")

        with monkeypatch.context() as patch:
            patch.setattr(cache.os, "fsync", fail)  # where a full disk tells at the latest
            with pytest.raises(UserError, match=rf"data.cache_dir=.*cache {message}.*\nName anoth"):
                tokens(path)
        assert [found.name for found in (path.parent / "cache").glob("[!.]*")] == []
    tokens(path)
    source = whole("data.file", str(path))
    with pytest.raises(UserError, match=r"data.cache_dir=.*text.txt is a file"):
        tokens_of(source, Bytes(), "corpus", path)
