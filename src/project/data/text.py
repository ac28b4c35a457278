"""A text as windows of tokens, each with the token that comes next at each place.

Batches are (inputs, labels), both (B, length). Labels of padding are -100, and it stands at the
end, where a network that looks back alone never sees it.
"""

import zlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness import Batch, BatchedDataset, SplitDataModule, UserError, cached, uniform
from project.data.text_tokens import Tokenizer, encoded

IGNORED = -100  # the label that torch's losses leave out
NUM_SENTENCES, SENTENCES_SEED = 12_000, 0  # of the text to begin with, made of this grammar
ADJECTIVES = ("old", "small", "grey", "happy", "tired", "clever")
NOUNS = ("cat", "dog", "horse", "bird", "farmer", "child", "king", "student")
VERBS = ("see", "follow", "like", "hear", "know", "chase")
ENDINGS = ("at night", "in the garden", "every day", "near the river")
PLURALS = {"child": "children"}


class CorpusWindows(BatchedDataset):
    """A text cut into blocks: each of its tokens but the first is the label of one place.

    Args:
        ids: of the text, (N,).
        length: tokens of a window.
        moves: cut elsewhere in each epoch, and leave out what is no whole window at both ends.
        seed: decides, with the epoch, where.
    """

    def __init__(self, ids: NDArray[Any], length: int, moves: bool = False, seed: int = 0) -> None:
        self.ids, self.length, self.moves, self.seed = ids, length, moves, seed

    def __len__(self) -> int:
        num_labels = len(self.ids) - 1
        return num_labels // self.length - 1 if self.moves else -(-num_labels // self.length)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Read inputs and labels (B, length)."""
        places = np.asarray(indices)[:, None] * self.length + np.arange(self.length + 1)
        if self.moves:
            epoch = indices.epoch if isinstance(indices, Batch) else 0
            places += int(uniform(self.seed, epoch, [0], 1)[0, 0] * self.length)
        ids = self.ids[np.minimum(places, len(self.ids) - 1)].astype(np.int64)  # (B, length + 1)
        labels = np.where(places[:, 1:] < len(self.ids), ids[:, 1:], IGNORED)
        return torch.from_numpy(np.ascontiguousarray(ids[:, :-1])), torch.from_numpy(labels)


class LineWindows(BatchedDataset):
    """A window for each line, which begins with ``end_id`` as input and ends with it as label.

    Args:
        ids: of all lines, (N,).
        ends: where each line ends in them, (num_lines,).
        lines: positions of those to take; longer ones than a window are cut.
        length: tokens of a window.
        end_id: stands before and after each line, and fills up a window.
    """

    def __init__(
        self,
        ids: NDArray[Any],
        ends: NDArray[np.int64],
        lines: NDArray[np.int64],
        length: int,
        end_id: int,
    ) -> None:
        sizes = np.diff(ends, prepend=0)
        self.ids, self.length, self.end_id = ids, length, end_id
        self.starts, self.sizes = (ends - sizes)[lines], sizes[lines]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Read inputs and labels (B, length)."""
        starts, sizes = self.starts[indices][:, None], self.sizes[indices][:, None]
        places = np.arange(self.length)
        is_text = places < sizes  # (B, length)
        labels = np.where(places == sizes, self.end_id, IGNORED)
        labels[is_text] = self.ids[(starts + places)[is_text]]
        inputs = np.roll(labels, 1, axis=1)  # the input is the label before
        inputs[:, 0] = self.end_id
        inputs[inputs == IGNORED] = self.end_id
        return torch.from_numpy(inputs), torch.from_numpy(labels)


class Text(SplitDataModule):
    """A text file as windows of tokens.

    Args:
        file: the text; ``None`` makes sentences of a small grammar.
        unit: ``"corpus"`` cuts one long text into windows, and into splits one behind the other;
            ``"lines"`` makes a window of each line that is not empty, and draws the splits.
        length: tokens of a window.
        tokenizer: ``"bytes"``, or the path of a ``tokenizer.json``.
        end_token: the tokenizer's own token that ends a text; ``None`` adds one.
        val_file: a text of its own to validate on; then nothing of ``file`` is.
        test_file: a text of its own to test on.
        predict_file: lines to predict on; ``None`` predicts on the test split.
        cache_dir: folder for the tokens.
        **kwargs: see ``SplitDataModule``; with ``augment`` a corpus is cut elsewhere in each epoch.
    """

    def __init__(
        self,
        file: str | None = None,
        unit: Literal["corpus", "lines"] = "corpus",
        length: int = 128,
        tokenizer: str = "bytes",
        end_token: str | None = None,
        val_file: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        cache_dir: str = ".cache",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if unit not in ("corpus", "lines") or length < 2:
            raise UserError(f"data.unit={unit} is corpus or lines, data.length={length} 2 or more.")
        self.file, self.unit, self.length = file, unit, length
        self.tokenizer_name, self.end_token = tokenizer, end_token
        self.files = {"val": val_file, "test": test_file}
        self.predict_file, self.cache_dir = predict_file, Path(cache_dir)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the training has learnt with."""
        return Tokenizer(*self.facts["tokenizer"])

    def path_of(self, file: str | None) -> Path:
        """The path of a text; that of the sentences, which are made once, where none is given."""
        if file is not None:
            return Path(file)
        path = self.cache_dir / f"sentences_{NUM_SENTENCES}_{SENTENCES_SEED}.txt"

        def write(part: Path) -> None:
            part.write_text(sentences(NUM_SENTENCES, SENTENCES_SEED), encoding="utf-8")

        return cached(path, write)

    def tokens(self, file: str | None, unit: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids of a file, and where its lines end."""
        path = self.path_of(file)
        ids, ends = encoded(path, self.tokenizer, unit == "lines", self.cache_dir)
        if not len(ids):
            raise UserError(f"data.file={path} is empty.")
        return ids, ends

    def text_of(self, split: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids of a split, and positions of its lines where ``unit=lines``."""
        own = self.files.get(split)
        ids, ends = self.tokens(own or self.file, self.unit)
        shares = {"val": self.val_fraction, "test": self.test_fraction}
        shares = {s: 0.0 if self.files[s] else share for s, share in shares.items()}
        if self.unit == "lines":
            lines = np.flatnonzero(np.diff(ends, prepend=0))
            if not own:
                parts = self.split(len(lines))
                taken = [parts[s] for s in ("train", *(s for s in shares if self.files[s]))]
                used = parts[split] if split != "train" else np.sort(np.concatenate(taken))
                lines = lines[used]
            return ids, lines
        if not own:
            test = round(len(ids) * (1 - shares["test"]))
            val = round(len(ids) * (1 - shares["test"] - shares["val"]))
            ids = {"train": ids[:val], "val": ids[val:test], "test": ids[test:]}[split]
        needed = 2 * self.length + 1 if split == "train" else 2
        if len(ids) < needed:
            raise UserError(
                f"data.file={own or self.file} has {len(ids)} tokens to {split} on, which needs "
                f"{needed}.\nGive more text, or a smaller data.length."
            )
        return ids, ends

    @cached_property
    def checksum(self) -> str:
        """By which a run knows the text that its splits were drawn from."""
        ids, _ = self.tokens(self.file, self.unit)
        some = ids[:: max(1, len(ids) // 2**20)]
        return f"{len(ids)}-{zlib.crc32(np.ascontiguousarray(some).data)}"

    def learn(self) -> dict[str, Any]:
        """The tokenizer and its sizes; all text is encoded, so that mistakes show at once."""
        self.tokenizer = tokenizer = Tokenizer.read(self.tokenizer_name, self.end_token)
        names = {self.file, *filter(None, self.files.values())}
        for split in ("train", "val", "test"):
            self.text_of(split)
        num_tokens = num_bytes = 0
        for name in names:
            ids, ends = self.tokens(name, self.unit)
            num_tokens += len(ids) + (len(ends) if self.unit == "lines" else 0)
            num_bytes += self.path_of(name).stat().st_size
        self.say(f"data.file={self.file}: {num_tokens:,} tokens of {tokenizer.vocab_size:,} kinds")
        return {
            "vocab_size": tokenizer.vocab_size,
            "length": self.length,
            "pad_id": tokenizer.end_id,
            "bytes_per_token": num_bytes / num_tokens,
            "tokenizer": [tokenizer.json, tokenizer.end_token],
            "drawn_from": self.drawn_from(self.checksum),
        }

    def make_dataset(self, split: str) -> CorpusWindows | LineWindows:
        """The windows of one split; predictions are made on lines of a file, or on the test's."""
        end_id = self.tokenizer.end_id
        if split == "predict" and self.predict_file is not None:
            ids, ends = self.tokens(self.predict_file, "lines")
            return LineWindows(ids, ends, np.arange(len(ends)), self.length, end_id)
        part = "test" if split == "predict" else split
        if part == "test" and self.files["test"] is None:
            self.warn_if_changed(self.checksum)
        ids, lines = self.text_of(part)
        if self.unit == "lines":
            ends = self.tokens(self.files.get(part) or self.file, "lines")[1]
            windows = LineWindows(ids, ends, lines, self.length, end_id)
            if num_cut := int((windows.sizes > self.length).sum()):
                self.say(f"{split}: {num_cut:,} lines are longer than data.length, and are cut")
            return windows
        return CorpusWindows(ids, self.length, split == "train" and self.augment, self.seed)

    def prompt(self, text: str) -> list[int]:
        """The ids of a text to go on with; a line begins with the token that ends one."""
        if self.unit == "lines":
            return [self.tokenizer.end_id, *self.tokenizer.encode([text])[0].tolist()]
        ids: list[int] = self.tokenizer.encode([text or "\n"])[0].tolist()
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, up to the one that ends it."""
        return self.tokenizer.decode(ids)


def sentences(num_sentences: int, seed: int) -> str:
    """Sentences whose verbs agree with their subjects, also across a relative clause.

    ``the old cat that the dogs chase sees a king at night.``

    Args:
        num_sentences: one on each line.
        seed: decides which.
    """
    rng = np.random.default_rng(seed)
    return "".join(f"{_sentence(rng)}.\n" for _ in range(num_sentences))


def _sentence(rng: np.random.Generator) -> str:
    subject, is_one = _phrase(rng)
    words = [subject]
    if rng.random() < 0.3:
        other, is_one_other = _phrase(rng)
        words.append(f"that {other} {_verb(rng, is_one_other)}")
    words += [_verb(rng, is_one), _phrase(rng)[0]]
    if rng.random() < 0.3:
        words.append(_one_of(rng, ENDINGS))
    return " ".join(words)


def _phrase(rng: np.random.Generator) -> tuple[str, bool]:
    """A noun with what stands before it, and whether it is one thing."""
    is_one, noun = bool(rng.random() < 0.5), _one_of(rng, NOUNS)
    article = _one_of(rng, ("the", "a") if is_one else ("the", "some"))
    words = [_one_of(rng, ADJECTIVES)] if rng.random() < 0.4 else []
    words.append(noun if is_one else PLURALS.get(noun, noun + "s"))
    if article == "a" and words[0][0] in "aeiou":
        article = "an"
    return " ".join([article, *words]), is_one


def _verb(rng: np.random.Generator, is_one: bool) -> str:
    return _one_of(rng, VERBS) + ("s" if is_one else "")


def _one_of(rng: np.random.Generator, words: tuple[str, ...]) -> str:
    return words[rng.integers(len(words))]
