"""A text is encoded once, by one process; what was killed is done again."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from harness.data import caching
from harness.text import cache, reading
from harness.text.cache import Tokens, tokens_of
from harness.text.datamodule import Text
from harness.text.reading import whole
from harness.text.tokenizers import Bytes, OfLibrary, trained

TEXT = "".join(f"line {i}, größer\n" for i in range(500)).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 100)


def tokens(path: Path, unit: str = "corpus", tokenizer=None) -> Tokens:
    cache_dir = path.parent / "cache"
    return tokens_of(whole("data.file", str(path)), tokenizer or Bytes(), unit, "strict", cache_dir)


def slow(path: Path, seconds: float, done) -> None:
    """Encode as a process of its own, and take that long."""
    encode = Bytes.corpus

    def corpus(self, piece: bytes, errors: str):
        done.put("began")
        time.sleep(seconds)
        return encode(self, piece, errors)

    Bytes.corpus = corpus
    done.put(len(tokens(path).ids))


def test_tokens_are_the_text_in_whatever_pieces(path: Path, small_pieces) -> None:
    assert tokens(path).ids.tobytes() == TEXT
    lines = tokens(path, "lines")
    assert lines.ids.tobytes() == TEXT.replace(b"\n", b"")
    assert len(lines.ends) == 500
    assert lines.num_labels == len(TEXT)


@pytest.mark.parametrize("text", ["a" * 1000, "ü" * 500, "die süße Größe " * 50, "x" + "€" * 300])
def test_line_longer_than_a_piece(text: str, tmp_path: Path, small_pieces) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    source = whole("data.file", str(path))
    found = list(reading.pieces(source, cuts_lines=True))
    assert len(found) > 5
    assert "".join(piece.decode() for piece in found) == text  # no character is cut
    assert len(list(reading.pieces(source, cuts_lines=False))) == 1


def test_pair_encoding_gives_the_text_back(path: Path, small_pieces) -> None:
    tokenizer = OfLibrary(trained(TEXT.decode().splitlines(keepends=True), 300))
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
        assert tokens(path).folder == first
    path.write_bytes(TEXT + b"more")
    assert tokens(path).ids.tobytes() == TEXT + b"more"
    status = path.stat()
    path.write_bytes(TEXT + b"MORE")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert tokens(path).ids.tobytes() == TEXT + b"MORE"


def test_cache_is_used_where_nothing_can_be_written(path: Path, monkeypatch) -> None:
    expected = tokens(path).ids.tobytes()
    monkeypatch.setattr(caching, "locked", None)
    assert tokens(path).ids.tobytes() == expected


def test_one_process_encodes_and_the_others_wait(path: Path) -> None:
    done = multiprocessing.Queue()
    started = [multiprocessing.Process(target=slow, args=(path, 1.0, done)) for _ in range(3)]
    for process in started:
        process.start()
    said = [done.get(timeout=60) for _ in range(4)]
    assert sorted(map(str, said)) == sorted(["began", *[str(len(TEXT))] * 3])


def test_killed_process_leaves_nothing_that_counts(path: Path) -> None:
    done = multiprocessing.Queue()
    process = multiprocessing.Process(target=slow, args=(path, 100.0, done))
    process.start()
    assert done.get(timeout=60) == "began"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    folder = path.parent / "cache"
    (part,) = folder.glob("*.part")
    (part / "ids").write_bytes(b"half")
    assert tokens(path).ids.tobytes() == TEXT
    assert list(folder.glob("*.part")) == []


def test_tokenizer_is_trained_on_the_training_split_alone_and_kept_in_the_facts(
    tmp_path: Path,
) -> None:
    for unit in ("corpus", "lines"):
        path = tmp_path / f"{unit}.txt"
        path.write_text("abab cdcd\n" * 200)
        settings = {"unit": unit, "length": 8, "cache_dir": str(tmp_path / "cache")}
        own = tmp_path / "own.txt"
        own.write_text("xyxyxyxy\n" * 500)
        data = Text(batch_size=4, file=str(path), vocab_size=262, val_file=str(own), **settings)
        facts = data.facts
        assert "ab" in facts["tokenizer"]["json"]
        assert '"xy"' not in facts["tokenizer"]["json"]
        for kept in (tmp_path / "cache").glob("tokenizer_*"):
            kept.unlink()
        again = Text(batch_size=4, file=str(path), vocab_size=262, val_file=str(own), **settings)
        again.facts = facts
        assert again.decode(again.prompt("abab")) == ("" if unit == "lines" else "abab")
        assert not list((tmp_path / "cache").glob("tokenizer_*"))  # nothing is trained again
