"""What a batch of text holds: each token is the label of one place, under its own inputs."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from harness import Batch
from harness.text.datamodule import Text

END = 256


@pytest.fixture
def text(tmp_path: Path):
    """A data module of a text; a corpus is trained on nearly whole."""

    def make(content: str | bytes, **settings) -> Text:
        path = tmp_path / "text.txt"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        settings = {"length": 8, "cache_dir": str(tmp_path / "cache")} | settings
        return Text(batch_size=4, file=str(path), **settings)

    return make


def whole(data: Text, split: str, epoch: int = 0) -> tuple[Tensor, Tensor]:
    dataset = data.make_dataset(split)
    return dataset.__getitems__(Batch(list(range(len(dataset))), epoch))


def words(ids: Tensor) -> list[str]:
    """Rows as texts, with ``|`` for the end of a line and ``_`` for what is ignored."""
    signs = {END: "|", -100: "_"} | {i: chr(i) for i in range(256)}
    return ["".join(signs[i] for i in row) for row in ids.tolist()]


CORPUS = "".join(f"{i:03}," for i in range(50))  # 200 bytes


def test_blocks_of_a_corpus_lie_behind_each_other(text) -> None:
    data = text(CORPUS, augment=False, val_fraction=0.25, test_fraction=0.25)
    inputs, labels = whole(data, "train")
    assert words(inputs)[:2] == ["000,001,", "002,003,"]
    assert words(labels)[:2] == ["00,001,0", "02,003,0"]
    assert words(labels)[-1] == "24,_____"  # padded, and not dropped
    assert words(inputs)[-1] == "024" + "|" * 5


def test_splits_of_a_corpus_share_no_token(text) -> None:
    data = text(CORPUS, augment=False)
    found = {split: whole(data, split) for split in ("train", "val", "test")}
    texts = {}
    for split, (inputs, labels) in found.items():
        first = words(inputs)[0][0]
        texts[split] = first + "".join(words(labels)).replace("_", "")
    assert "".join(texts.values()) == CORPUS
    assert [len(part) for part in texts.values()] == [160, 20, 20]


@pytest.mark.parametrize("size", [41, 42, 48, 49, 50])
def test_each_epoch_has_each_label_once_and_cuts_elsewhere(text, size: int) -> None:
    content = bytes(range(size))
    data = text(content + bytes(100), val_fraction=0.3, test_fraction=50 / (size + 100))
    data._parts["train"] = data._text._replace(end=size)
    seen = set()
    for epoch in range(8):
        inputs, labels = whole(data, "train", epoch)
        pairs = [(i, j) for i, j in zip(inputs.flatten(), labels.flatten(), strict=True) if j >= 0]
        assert sorted((int(i), int(j)) for i, j in pairs) == [(i, i + 1) for i in range(size - 1)]
        seen.add(int(inputs[0, 0]))
    assert len(seen) > 4


def test_batch_does_not_depend_on_how_it_is_cut(text) -> None:
    for unit in ("corpus", "lines"):
        dataset = text(CORPUS.replace(",", "\n"), unit=unit).make_dataset("train")
        indices = list(range(len(dataset)))
        both = dataset.__getitems__(Batch(indices, 3))
        parts = [dataset.__getitems__(Batch(part, 3)) for part in (indices[:3], indices[3:])]
        for k in (0, 1):
            assert torch.equal(both[k], torch.cat([part[k] for part in parts]))


LINES = "one\n\nfour\r\nseventeen\nfive"


def test_line_is_a_padded_window(text) -> None:
    data = text(LINES, unit="lines")
    data._lines = lambda tokenizer: {"train": np.array([0, 2, 3, 4])}
    inputs, labels = whole(data, "train")
    assert words(labels) == ["one|____", "four|___", "seventee", "five|___"]
    assert words(inputs) == ["|one||||", "|four|||", "|sevente", "|five|||"]


def test_packed_window_holds_whole_lines(text) -> None:
    data = text("ab\ncd\nefg\nhijklmnopq\nr\ns\n", unit="lines", packing=True)
    data._lines = lambda tokenizer: {"train": np.arange(6)}
    inputs, labels = whole(data, "train")
    assert words(labels) == ["ab|cd|__", "efg|____", "hijklmno", "r|s|____"]
    assert words(inputs) == ["|ab|cd||", "|efg||||", "|hijklmn", "|r|s||||"]
    assert data.facts["separator"] == END


def test_lines_of_splits_are_all_and_none_twice(text) -> None:
    content = "".join(f"{i:02}\n" + "\n" * (i % 3) for i in range(40))
    found = []
    for fold in range(4):
        data = text(content, unit="lines", fold=fold, num_folds=4)
        parts = {s: words(whole(data, s)[1]) for s in ("train", "val", "test")}
        assert sorted([*parts["train"], *parts["val"], *parts["test"]]) == [
            f"{i:02}|_____" for i in range(40)
        ]
        found += parts["test"]
    assert sorted(found) == [f"{i:02}|_____" for i in range(40)]


@pytest.mark.parametrize("unit", ["corpus", "lines"])
def test_files_of_their_own_take_no_share_of_the_text(text, unit: str, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("xx\nyy\nzz\n")
    data = text("ab\n" * 40, unit=unit, val_file=str(own), augment=False)
    assert "x" in words(whole(data, "val")[1])[0]
    num_labels = {s: int((whole(data, s)[1] >= 0).sum()) for s in ("train", "val", "test")}
    expected = {"train": 108 - 1, "val": 9 - 1, "test": 12 - 1}
    if unit == "lines":
        expected = {"train": 36 * 3, "val": 9, "test": 12}
    assert num_labels == expected


def test_lines_to_predict_on_are_all_there(text, tmp_path: Path) -> None:
    """Also empty ones: a prediction's number is that of its line."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n\nbc")
    data = text(CORPUS, predict_file=str(prompts))
    assert words(whole(data, "predict")[1]) == ["a|______", "|_______", "bc|_____"]


def test_worker_maps_the_files_itself(text) -> None:
    dataset = text(CORPUS * 50).make_dataset("train")
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    found = pickle.loads(data).__getitems__([5])
    assert all(map(torch.equal, dataset.__getitems__([5]), found))
