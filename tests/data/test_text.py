from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness import Batch, UserError
from project.data.text import Text

END = 256
CORPUS = "".join(f"{i:03}," for i in range(50))  # 200 bytes
Made = Callable[..., Text]


@pytest.fixture
def text(tmp_path: Path) -> Made:
    def make(content: str | bytes, **settings: Any) -> Text:
        path = tmp_path / "text.txt"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        chosen: dict[str, Any] = {"length": 8, "cache_dir": str(tmp_path / "cache")}
        chosen |= {"val_fraction": 0.1, "test_fraction": 0.1}
        return Text(batch_size=4, file=str(path), **chosen | settings)

    return make


def whole(data: Text, split: str, epoch: int = 0) -> tuple[Tensor, Tensor]:
    dataset = data.make_dataset(split)
    return dataset.__getitems__(Batch(list(range(len(dataset))), epoch))


def signs(ids: Tensor) -> list[str]:
    """Rows as texts, with ``|`` for the end of a line and ``_`` for what is ignored."""
    named = {END: "|", -100: "_"} | {i: chr(i) for i in range(256)}
    return ["".join(named[i] for i in row) for row in ids.tolist()]


def test_blocks_of_a_corpus_lie_behind_each_other(text: Made) -> None:
    data = text(CORPUS, augment=False, val_fraction=0.25, test_fraction=0.25)
    inputs, labels = whole(data, "train")
    assert signs(inputs)[:2] == ["000,001,", "002,003,"]
    assert signs(labels)[:2] == ["00,001,0", "02,003,0"]
    assert signs(labels)[-1] == "24,_____"  # padded, and not dropped


def test_splits_of_a_corpus_share_no_token(text: Made) -> None:
    data = text(CORPUS, augment=False)
    texts = {}
    for split in ("train", "val", "test"):
        inputs, labels = whole(data, split)
        texts[split] = signs(inputs)[0][0] + "".join(signs(labels)).replace("_", "")
    assert "".join(texts.values()) == CORPUS
    assert [len(part) for part in texts.values()] == [160, 20, 20]


def test_each_epoch_is_cut_elsewhere(text: Made) -> None:
    data = text(bytes(range(128)))
    firsts = set()
    for epoch in range(8):
        inputs, labels = (part.flatten().tolist() for part in whole(data, "train", epoch))
        assert labels == [i + 1 for i in inputs]
        firsts.add(inputs[0])
    assert len(firsts) > 3
    assert firsts <= set(range(8))


def test_lines_end_and_are_padded(text: Made) -> None:
    data = text("abc\n\nlonger line\r\nx\n" * 5, unit="lines")
    pairs = set()
    for split in ("train", "val", "test"):
        inputs, labels = whole(data, split)
        pairs |= {*zip(signs(inputs), signs(labels), strict=True)}
    assert pairs == {
        ("|abc||||", "abc|____"),
        ("|longer ", "longer l"),
        ("|x||||||", "x|______"),
    }


def test_a_tokenizer_of_the_library_is_kept_with_the_run(text: Made, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["the", "cat", "sees", "[UNK]"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    data = text("the cat sees\nthe dog\n" * 30, tokenizer=str(tmp_path / "tokenizer.json"))
    assert (data.facts["vocab_size"], data.facts["pad_id"]) == (5, 4)
    assert data.prompt("the cat") == [0, 1]
    again = text("the cat sees\nthe dog\n" * 30)
    again.facts = data.facts
    (tmp_path / "tokenizer.json").unlink()
    assert again.tokenizer.decode([0, 1, 4, 2]) == "the cat"


def test_mistakes_are_told_in_lines(text: Made, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("x")
    for content, settings, message in (
        ("", {}, "is empty"),
        ("short", {}, "data.file=.*has 4 tokens for train, but data.length=8 needs 17"),
        (b"\xe9\xff" * 100, {}, "is not text in UTF-8"),
        (CORPUS, {"tokenizer": str(tmp_path / "nope.json")}, "is not a tokenizer.json"),
        (CORPUS, {"val_file": str(tmp_path / "nope.txt")}, "data.val_file=.*nope.txt cannot be"),
        (CORPUS, {"val_file": str(short)}, "data.val_file=.*short.txt has 1 tokens for val"),
    ):
        with pytest.raises(UserError, match=message) as told:
            text(content, **settings).infer_facts()
        assert len(str(told.value).splitlines()) <= 3
