"""What cannot be trained on is told in a line or two, and leaves nothing half made."""

import builtins
import errno
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from harness import UserError
from harness.text import cache
from harness.text.datamodule import Text


def learn(tmp_path: Path, content: bytes = b"abc def\n" * 40, **settings) -> dict:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    settings = {"file": str(path), "length": 8, "cache_dir": str(tmp_path / "cache")} | settings
    return Text(batch_size=4, **settings).facts


@pytest.fixture
def few_words(tmp_path: Path) -> str:
    """A tokenizer of words, which knows two."""
    path = tmp_path / "tokenizer.json"
    words = {"[UNK]": 0, "abc": 1, "def": 2, "[SEP]": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"file": "nope.txt"}, "data.file=nope.txt cannot be read: No such file"),
        ({"file": "/"}, "data.file=/ is a folder"),
        ({"val_file": "nope.txt"}, "data.val_file=nope.txt cannot be read"),
        ({"content": b""}, "text.txt is empty"),
        ({"content": b"\xef\xbb\xbf"}, "text.txt is empty"),
        ({"content": b"abcdefgh"}, "has 6 tokens for the train split, which needs 9"),
        ({"content": b"\n\n\n" * 30, "unit": "lines"}, "0 samples cannot be split"),
        ({"length": 1}, "data.length=1 must be a whole number from 2 on"),
        ({"unit": "words"}, "data.unit=words: use corpus or lines"),
        ({"errors": "ignore"}, "data.errors=ignore: use strict or replace"),
        ({"fold": 1}, "data.fold is for lines: add data.unit=lines"),
        ({"packing": True}, "data.packing is for lines"),
        ({"unit": "lines", "fold": 7}, "data.fold=7 must be from 0 to 4"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0 must be above 0"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "must be below 1 in sum"),
        ({"vocab_size": 100}, "data.vocab_size=100 must be 258 or more"),
        ({"vocab_size": 300, "tokenizer": "a.json"}, "leave out data.tokenizer"),
        ({"end_token": "[SEP]"}, "data.end_token is a token of data.tokenizer"),
        ({"tokenizer": "nope.json"}, "data.tokenizer=nope.json cannot be read: No such"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_told(settings: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        learn(tmp_path, **settings)
    assert message in str(error.value)
    assert str(error.value).count("\n") <= 2


@pytest.mark.parametrize("content", ["no json", '{"model": 1}', "\udcff"])
def test_file_that_is_no_tokenizer_is_told(content: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"t.json is no tokenizer.json"):
        learn(tmp_path, tokenizer=str(path))


def test_token_that_ends_a_text_is_the_tokenizers_own_or_added(few_words, tmp_path: Path) -> None:
    assert learn(tmp_path, tokenizer=few_words)["end_id"] == 4
    named = learn(tmp_path, tokenizer=few_words, end_token="[SEP]")
    assert (named["end_id"], named["vocab_size"]) == (3, 4)
    with pytest.raises(UserError, match=r"is no token of data.tokenizer.\nIt has \[SEP\], \[UNK\]"):
        learn(tmp_path, tokenizer=few_words, end_token="</s>")


@pytest.mark.parametrize("unit", ["corpus", "lines"])
def test_line_that_is_no_utf8_is_named_or_replaced(unit: str, few_words, tmp_path: Path) -> None:
    content = b"abc\ndef\n" * 20 + b"ab\xff\n" + b"abc\n" * 20
    settings = {"tokenizer": few_words, "unit": unit}
    with pytest.raises(UserError, match=r"text.txt, line 41: invalid start byte"):
        learn(tmp_path, content, **settings, val_fraction=0.4, test_fraction=0.4)
    assert list((tmp_path / "cache").glob("*.part")) == []
    learn(tmp_path, content, **settings, errors="replace")
    assert learn(tmp_path, content)["tokenizer"] == {"kind": "bytes"}  # takes anything


def test_missing_library_is_told(monkeypatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install -e .\[text\]"):
        learn(tmp_path, vocab_size=300)
    learn(tmp_path)


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, "has no room"), (errno.EROFS, "cannot be written")]
)
def test_cache_without_room_is_told_and_left_clean(
    number: int, message: str, monkeypatch, tmp_path: Path
) -> None:
    def fail(*_) -> None:
        raise OSError(number, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", fail)  # where a full disk tells at the latest
        with pytest.raises(UserError, match=rf"data.cache_dir=.*cache {message}.*\nName another"):
            learn(tmp_path)
    assert [path.name for path in (tmp_path / "cache").glob("[!.]*")] == []
    learn(tmp_path)


def test_cache_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match=r"data.cache_dir=.*cache is a file"):
        learn(tmp_path)
