"""A text as windows of tokens, with the next token as label of each token.

In: a text file. Out: batches (inputs, labels), both (B, length). Padding is at the end of a window,
so no token of a causal network attends to it. The labels of padding are -100.
"""

import random
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness import BatchedDataset, SplitDataModule, UserError, cached, uniform
from project.data.text_tokens import Tokenizer, encode_file

IGNORED = -100  # the label that torch's losses ignore
NOUNS = ("cat", "dog", "horse", "bird", "farmer", "king")
VERBS = ("see", "follow", "like", "hear", "know", "chase")
NUMBERS = (
    ("the", "", "s"),
    ("a", "", "s"),
    ("the", "s", ""),
    ("some", "s", ""),
)  # article, ending of the noun, ending of the verb


def write_sentences(path: Path) -> None:
    """Write 20,000 sentences whose verbs agree with their subjects: ``the cats chase a king``."""
    rng, lines = random.Random(0), list[str]()
    for _ in range(20_000):
        (article, plural, ending), (other, other_plural, _) = rng.choices(NUMBERS, k=2)
        subject, verb, object_ = rng.choice(NOUNS), rng.choice(VERBS), rng.choice(NOUNS)
        line = f"{article} {subject}{plural} {verb}{ending} {other} {object_}{other_plural}.\n"
        lines.append(line)
    path.write_text("".join(lines))


class CorpusWindows(BatchedDataset):
    """A text cut into windows. The label of each token is the next token of the text.

    Args:
        ids: token ids of the text, shape (N,).
        length: tokens per window.
        seed: cuts the text at other positions in each epoch, and drops incomplete windows at both
            ends. With ``None`` the positions are fixed, and padding completes the last window.
    """

    def __init__(self, ids: NDArray[Any], length: int, seed: int | None = None) -> None:
        self.ids, self.length, self.seed = ids, length, seed

    def __len__(self) -> int:
        num_labels = len(self.ids) - 1
        is_fixed = self.seed is None
        return -(-num_labels // self.length) if is_fixed else num_labels // self.length - 1

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Read inputs and labels (B, length)."""
        positions = np.asarray(indices)[:, None] * self.length + np.arange(self.length + 1)
        if self.seed is not None:
            shift = uniform(self.seed, self.epoch_of(indices), [0], 1)[0, 0]
            positions += int(shift * self.length)
        ids = self.ids[np.minimum(positions, len(self.ids) - 1)].astype(np.int64)  # (B, length + 1)
        labels = np.where(positions[:, 1:] < len(self.ids), ids[:, 1:], IGNORED)
        return torch.from_numpy(np.ascontiguousarray(ids[:, :-1])), torch.from_numpy(labels)


class LineWindows(BatchedDataset):
    """A window for each line. ``end_id`` is its first input, and the label of its last token.

    Args:
        ids: token ids of all lines, shape (N,).
        starts: index of each line's first token in ``ids``, shape (num_lines,).
        sizes: tokens of each line, shape (num_lines,); lines longer than a window are cut.
        length: tokens per window.
        end_id: the id before and after each line, and of padding.
    """

    def __init__(
        self,
        ids: NDArray[Any],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        length: int,
        end_id: int,
    ) -> None:
        self.ids, self.starts, self.sizes = ids, starts, sizes
        self.length, self.end_id = length, end_id

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Read inputs and labels (B, length)."""
        starts, sizes = self.starts[indices][:, None], self.sizes[indices][:, None]
        positions = np.arange(self.length)
        is_text = positions < sizes  # (B, length)
        labels = np.where(positions == sizes, self.end_id, IGNORED)
        labels[is_text] = self.ids[(starts + positions)[is_text]]
        inputs = np.roll(labels, 1, axis=1)  # each input is the label before it
        inputs[:, 0] = self.end_id
        inputs[inputs == IGNORED] = self.end_id
        return torch.from_numpy(inputs), torch.from_numpy(labels)


class Text(SplitDataModule):
    """A text file as windows of tokens.

    Args:
        file: the text; ``None`` generates 20,000 short sentences.
        unit: ``"corpus"``: windows of one long text, whose beginning is for training, the middle
            for validation and the end for the test. ``"lines"``: a window for each line that is
            not empty, with random splits.
        length: tokens per window.
        tokenizer: ``"bytes"``, or the path of a ``tokenizer.json``.
        val_file: a text to validate on; ``None`` uses a fraction of ``file``.
        test_file: a text to test on; ``None`` uses a fraction of ``file``.
        predict_file: lines to predict on; ``None`` predicts on the test split.
        cache_dir: folder for the tokens.
        **kwargs: see ``SplitDataModule``. ``augment`` cuts a corpus differently in each epoch.
    """

    def __init__(
        self,
        file: str | None = None,
        unit: Literal["corpus", "lines"] = "corpus",
        length: int = 128,
        tokenizer: str = "bytes",
        val_file: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        cache_dir: str = ".cache",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.unit, self.length, self.tokenizer_name = unit, length, tokenizer
        self.files: dict[str, Any] = {
            "file": file or cached(Path(cache_dir) / "sentences.txt", write_sentences),
            "val_file": val_file,
            "test_file": test_file,
            "predict_file": predict_file,
        }
        self.cache_dir = Path(cache_dir)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the training used."""
        return Tokenizer(self.facts["tokenizer"])

    def tokens(self, key: str, by_line: bool) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the token ids of a text, and the index after each line's last token."""
        return encode_file(key, Path(self.files[key]), self.tokenizer, by_line, self.cache_dir)

    def corpus_windows(self, key: str, split: str) -> CorpusWindows:
        """Cut a text, or the range of ``file`` for a split, into windows."""
        ids, _ = self.tokens(key, by_line=False)
        if key == "file":
            val, test = (
                0 if self.files[f"{name}_file"] else fraction
                for name, fraction in (("val", self.val_fraction), ("test", self.test_fraction))
            )
            first, second = (round(len(ids) * end) for end in (1 - test - val, 1 - test))
            ids = {"train": ids[:first], "val": ids[first:second], "test": ids[second:]}[split]
        needed = 2 * self.length + 1 if split == "train" else 2
        if len(ids) < needed:
            raise UserError(
                f"data.{key}={self.files[key]} has {len(ids)} tokens for {split}, but data.length="
                f"{self.length} needs {needed}.\nUse a longer text, or a smaller data.length."
            )
        is_moved = split == "train" and self.augment
        return CorpusWindows(ids, self.length, self.seed if is_moved else None)

    @cached_property
    def line_parts(self) -> dict[str, NDArray[np.int64]]:
        """Indices of each split's lines among the lines of ``file`` that are not empty."""
        _, ends = self.tokens("file", by_line=True)
        parts = self.split(int(np.count_nonzero(np.diff(ends, prepend=0))))
        unused = [parts[name] for name in ("val", "test") if self.files[f"{name}_file"]]
        parts["train"] = np.sort(np.concatenate([parts["train"], *unused]))
        return parts

    def line_windows(self, key: str, split: str) -> LineWindows:
        """Make a window of each line of a text, or of each line of ``file`` in the split."""
        ids, ends = self.tokens(key, by_line=True)
        sizes = np.diff(ends, prepend=0)
        lines = np.arange(len(ends)) if split == "predict" else np.flatnonzero(sizes)
        if key == "file":
            lines = lines[self.line_parts[split]]
        starts, sizes = (ends - sizes)[lines], sizes[lines]
        return LineWindows(ids, starts, sizes, self.length, self.tokenizer.end_id)

    def windows(self, split: str) -> CorpusWindows | LineWindows:
        """Cut the text of a split into windows."""
        key = f"{split}_file" if self.files.get(f"{split}_file") else "file"
        is_lines = self.unit == "lines" or split == "predict"
        return self.line_windows(key, split) if is_lines else self.corpus_windows(key, split)

    @cached_property
    def checksum(self) -> str:
        """Checksum of the text, to warn if the file has changed since training."""
        ids, _ = self.tokens("file", self.unit == "lines")
        return f"{len(ids)}-{zlib.crc32(ids.data)}"

    def infer_facts(self) -> dict[str, Any]:
        """Encode all texts, so that errors show before training; return the tokenizer and sizes."""
        self.tokenizer = tokenizer = Tokenizer.read(self.tokenizer_name)
        for split in ("train", "val", "test"):
            self.windows(split)
        ids, ends = self.tokens("file", self.unit == "lines")
        num_tokens = len(ids) + (len(ends) if self.unit == "lines" else 0)
        name = self.files["file"]
        self.say(f"data.file={name}: {num_tokens:,} tokens of {tokenizer.vocab_size:,} kinds")
        return {
            "vocab_size": tokenizer.vocab_size,
            "length": self.length,
            "pad_id": tokenizer.end_id,
            "bytes_per_token": Path(name).stat().st_size / num_tokens,
            "tokenizer": tokenizer.text,
            "drawn_from": self.drawn_from(self.checksum),
        }

    def make_dataset(self, split: str) -> CorpusWindows | LineWindows:
        """Make the windows of a split; predict.py reads ``predict_file`` or the test split."""
        if split == "predict" and not self.files["predict_file"]:
            split = "test"
        if split == "test" and not self.files["test_file"]:
            self.warn_if_changed(self.checksum)
        windows = self.windows(split)
        if isinstance(windows, LineWindows) and (num := (windows.sizes > self.length).sum()):
            self.say(
                f"{split}: {num:,} lines are longer than data.length={self.length} and are cut"
            )
        return windows

    def prompt(self, text: str) -> list[int]:
        """Return the token ids of a text to continue; lines begin with ``end_id``."""
        is_lines = self.unit == "lines"
        ids = self.tokenizer.encode([text if is_lines or text else "\n"])[0].tolist()
        return [self.tokenizer.end_id, *ids] if is_lines else [*ids]
