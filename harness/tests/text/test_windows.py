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


def test_each_epoch_has_each_label_once_and_cuts_elsewhere(text) -> None:
    for size in (41, 42, 48, 49, 50):
        data = text(bytes(range(size)) + bytes(100), val_fraction=0.3)
        data._parts["train"] = data._text._replace(end=size)
        seen = set()
        for epoch in range(8):
            inputs, labels = (part.flatten().tolist() for part in whole(data, "train", epoch))
            pairs = [(i, j) for i, j in zip(inputs, labels, strict=True) if j >= 0]
            assert sorted(pairs) == [(i, i + 1) for i in range(size - 1)]
            seen.add(inputs[0])
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


def test_lines_of_splits_are_all_and_none_twice(text) -> None:
    content = "".join(f"{i:02}\n" + "\n" * (i % 3) for i in range(40))
    data = text(content, unit="lines")
    parts = [words(whole(data, split)[1]) for split in ("train", "val", "test")]
    assert sorted(line for part in parts for line in part) == [f"{i:02}|_____" for i in range(40)]
    assert all(parts)


def test_files_of_their_own_take_no_share_of_the_text(text, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("xx\nyy\nzz\n")
    for unit, expected in (("corpus", [108 - 1, 9 - 1, 12 - 1]), ("lines", [36 * 3, 9, 12])):
        data = text("ab\n" * 40, unit=unit, val_file=str(own), augment=False)
        assert "x" in words(whole(data, "val")[1])[0]
        num_labels = [int((whole(data, s)[1] >= 0).sum()) for s in ("train", "val", "test")]
        assert num_labels == expected


def test_lines_to_predict_on_are_all_there(text, tmp_path: Path) -> None:
    """Also empty ones: a prediction's number is that of its line."""
    prompts = tmp_path / "prompts.txt"
    data = text(CORPUS, predict_file=str(prompts))
    prompts.write_text("a\n\nbc")
    assert words(whole(data, "predict")[1]) == ["a|______", "|_______", "bc|_____"]
    prompts.write_text("\n\n")
    assert words(whole(data, "predict")[1]) == ["|_______", "|_______"]


def test_worker_maps_the_files_itself(text) -> None:
    dataset = text(CORPUS * 50).make_dataset("train")
    data = pickle.dumps(dataset)
    assert len(data) < 1000
    found = pickle.loads(data).__getitems__([5])
    assert all(map(torch.equal, dataset.__getitems__([5]), found))
