"""What cannot be trained on is told in a line or two, and leaves nothing half made."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from harness import UserError
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


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    for settings, message in (
        ({"file": "nope.txt"}, "data.file=nope.txt cannot be read: No such file"),
        ({"file": "/"}, "data.file=/ is a folder"),
        ({"content": b""}, "text.txt is empty"),
        ({"content": b"abcdefgh"}, "has 6 tokens for the train split, which needs 9"),
        ({"content": b"\n\n\n" * 30, "unit": "lines"}, "0 samples cannot be split"),
        ({"length": 1}, "data.length=1 must be a whole number from 2 on"),
        ({"unit": "words"}, "data.unit=words: use corpus or lines"),
        ({"val_fraction": 0.0}, "data.val_fraction=0.0 must be above 0"),
        ({"end_token": "[SEP]"}, "data.end_token is a token of data.tokenizer"),
        ({"tokenizer": "nope.json"}, "data.tokenizer=nope.json cannot be read: No such"),
    ):
        with pytest.raises(UserError) as error:
            learn(tmp_path, **settings)
        assert message in str(error.value)
        assert str(error.value).count("\n") <= 2
    path = tmp_path / "t.json"
    for content in (b"no json", b'{"model": 1}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"t.json is no tokenizer.json"):
            learn(tmp_path, tokenizer=str(path))


def test_token_that_ends_a_text_is_the_tokenizers_own_or_added(few_words, tmp_path: Path) -> None:
    assert learn(tmp_path, tokenizer=few_words)["end_id"] == 4
    named = learn(tmp_path, tokenizer=few_words, end_token="[SEP]")
    assert (named["end_id"], named["vocab_size"]) == (3, 4)
    with pytest.raises(UserError, match=r"is no token of data.tokenizer.\nIt has \[SEP\], \[UNK\]"):
        learn(tmp_path, tokenizer=few_words, end_token="</s>")


def test_line_that_is_no_utf8_is_named(few_words, tmp_path: Path) -> None:
    content = b"abc\ndef\n" * 20 + b"ab\xff\n" + b"abc\n" * 20
    for unit in ("corpus", "lines"):
        settings = {"tokenizer": few_words, "unit": unit, "val_fraction": 0.4}
        with pytest.raises(UserError, match=r"text.txt, line 41: invalid start byte"):
            learn(tmp_path, content, **settings, test_fraction=0.4)
        assert list((tmp_path / "cache").glob("*.part")) == []
    assert learn(tmp_path, content)["tokenizer"] == {"kind": "bytes"}  # takes anything
