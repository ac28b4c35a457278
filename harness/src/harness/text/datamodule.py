import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness.data.batches import BatchedDataset
from harness.data.caching import cached, hashed
from harness.data.checksum import checksum
from harness.data.datamodule import DataModule, tell
from harness.data.splits import split_positions
from harness.errors import UserError
from harness.files import write_durably
from harness.processes.launch import global_rank
from harness.text import tokenizers
from harness.text.cache import Tokens, tokens_of
from harness.text.reading import Source, cut, whole
from harness.text.sentences import sentences
from harness.text.tokenizers import Bytes, Tokenizer, tokenizer_of
from harness.text.windows import CorpusWindows, LineWindows, line_places

log = logging.getLogger(__name__)

NUM_SENTENCES, SENTENCES_SEED = 12_000, 0


class Text(DataModule):
    """A text, as windows of tokens with the token that comes next at each place.

    Args:
        file: the text; ``None`` makes sentences of a small grammar.
        unit: ``"corpus"`` cuts one long text into windows, and into splits one behind the other;
            ``"lines"`` makes a window of each line that is not empty, and draws the splits.
        length: tokens of a window.
        tokenizer: ``"bytes"``, or the path of a ``tokenizer.json``.
        end_token: the tokenizer's own token that ends a text; ``None`` adds one.
        val_fraction: share of the text kept for validation.
        test_fraction: share kept for the test.
        split_seed: decides which lines; independent of the run's seed, so that runs compare.
        val_file: a text of its own to validate on.
        test_file: a text of its own to test on.
        predict_file: lines to predict on; ``None`` predicts on the test split.
        cache_dir: folder for the tokens.
        **kwargs: see ``DataModule``; with ``augment`` a corpus is cut elsewhere in each epoch.
    """

    def __init__(
        self,
        file: str | None = None,
        unit: Literal["corpus", "lines"] = "corpus",
        length: int = 128,
        tokenizer: str = "bytes",
        end_token: str | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        split_seed: int = 0,
        val_file: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        cache_dir: str = ".cache",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.file, self.unit, self.length, self.tokenizer_name = file, unit, length, tokenizer
        self.end_token, self.split_seed = end_token, split_seed
        self.fractions = {"val": val_fraction, "test": test_fraction}
        self.files = {"val": val_file, "test": test_file}
        self.predict_file, self.cache_dir = predict_file, Path(cache_dir)
        self._check()

    def _check(self) -> None:
        """Refuse settings that cannot be, before anything is read."""
        if self.unit not in ("corpus", "lines"):
            raise UserError(f"data.unit={self.unit}: use corpus or lines.")
        if not isinstance(self.length, int) or self.length < 2:
            raise UserError(f"data.length={self.length} must be a whole number from 2 on.")
        for split, share in self.fractions.items():
            if not isinstance(share, (int, float)) or not 0 < share < 1:
                raise UserError(f"data.{split}_fraction={share} must be above 0 and below 1.")
        if sum(self.fractions.values()) >= 1:
            raise UserError("data.val_fraction and data.test_fraction must be below 1 in sum.")

    def learn(self) -> dict[str, Any]:
        """The tokenizer and its sizes; every split is encoded, so that mistakes show at once."""
        tokenizer = self._chosen_tokenizer()
        sources = {split: self._source(split) for split in ("train", "val", "test")}
        texts = {source: self._tokens(source, tokenizer) for source in sources.values()}
        for split, source in sources.items() if self.unit == "corpus" else []:
            num_tokens, least = len(texts[source].ids), self.length + 1 if split == "train" else 2
            if num_tokens < least:
                raise UserError(
                    f"{source.key}={source.path} has {num_tokens} tokens for the {split} split, "
                    f"which needs {least} with data.length={self.length}.\n"
                    "Give more text, or a smaller data.length."
                )
        if self.unit == "lines":
            self._lines(tokenizer)
        num_tokens = sum(tokens.num_labels for tokens in texts.values())
        files = ", ".join(dict.fromkeys(str(source.path) for source in texts))
        tell(f"{files}: {num_tokens:,} tokens, of {tokenizer.vocab_size:,} kinds")
        return {
            "vocab_size": tokenizer.vocab_size,
            "length": self.length,
            "end_id": tokenizer.end_id,
            "pad_id": tokenizer.end_id,
            "bytes_per_token": sum(t.num_bytes for t in texts.values()) / num_tokens,
            "tokenizer": tokenizer.fact,
            "drawn_from": self.drawn_from,
        }

    def make_dataset(self, split: str) -> BatchedDataset:
        """The windows of one split."""
        tokenizer = self.tokenizer
        if split == "predict" and self.predict_file is not None:
            source = whole("data.predict_file", self.predict_file)
            tokens = self._tokens(source, tokenizer, "lines")
            lines = np.arange(len(tokens.ends))  # type: ignore[arg-type]  # it has lines
            return self._line_windows(tokens, lines, source)
        split = "test" if split == "predict" else split
        if split == "test" and self.facts.get("drawn_from", self.drawn_from) != self.drawn_from:
            log.warning(
                "data.file=%s is another text than in training, and so may be the split: the test "
                "may be on text that was trained on.",
                self.file,
            )
        source = self._source(split)
        tokens = self._tokens(source, tokenizer)
        if self.unit == "lines":
            return self._line_windows(tokens, self._lines(tokenizer)[split], source)
        moves = split == "train" and self.augment
        return CorpusWindows(tokens, self.length, tokenizer.end_id, moves, self.seed)

    @cached_property
    def drawn_from(self) -> int | None:
        """What tells the text that splits are drawn from; ``None`` where the test has its own."""
        return None if self.files["test"] else checksum(self._text.path)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run has learnt with."""
        return tokenizer_of(self.facts["tokenizer"])

    def prompt(self, text: str) -> list[int]:
        """The ids of a text to go on with; a line begins with the token that ends one."""
        if self.unit == "lines":
            return [self.tokenizer.end_id, *self.tokenizer.encode(text)]
        return self.tokenizer.encode(text or "\n") or [self.tokenizer.end_id]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, up to the one that ends it."""
        ids = list(ids)
        if self.tokenizer.end_id in ids:
            ids = ids[: ids.index(self.tokenizer.end_id)]
        return self.tokenizer.decode(ids)

    @cached_property
    def _text(self) -> Source:
        """The whole text that splits are taken from."""
        if self.file is not None:
            return whole("data.file", self.file)
        name = f"sentences_{hashed([NUM_SENTENCES, SENTENCES_SEED])}.txt"
        made = cached(
            self.cache_dir / name,
            lambda path: write_durably(path, sentences(NUM_SENTENCES, SENTENCES_SEED).encode()),
        )
        return whole("data.file", str(made))

    @cached_property
    def _parts(self) -> dict[str, Source]:
        """A corpus in parts, one behind the other; a split with a file of its own has none."""
        shares = {s: 0.0 if self.files[s] else f for s, f in self.fractions.items()}
        shares = {"train": 1 - sum(shares.values())} | shares
        return dict(zip(shares, cut(self._text, list(shares.values())), strict=True))

    def _source(self, split: str) -> Source:
        """The text that a split is, or that its lines are in."""
        if name := self.files.get(split):
            return whole("data.val_file" if split == "val" else "data.test_file", name)
        return self._text if self.unit == "lines" else self._parts[split]

    def _tokens(self, source: Source, tokenizer: Tokenizer, unit: str | None = None) -> Tokens:
        return tokens_of(source, tokenizer, unit or self.unit, self.cache_dir)

    def _lines(self, tokenizer: Tokenizer) -> dict[str, NDArray[np.int64]]:
        """Positions of the lines of each split, without the empty ones."""
        filled = {
            split: np.flatnonzero(line_places(self._tokens(self._source(split), tokenizer))[1])
            for split in ("train", "val", "test")
        }
        found = filled["train"]
        positions = split_positions(
            len(found),
            val_fraction=self.fractions["val"],
            test_fraction=self.fractions["test"],
            seed=self.split_seed,
        )
        lines = {split: found[places] for split, places in positions.items()}
        for split in ("val", "test"):
            if self.files[split]:  # its share of the text is trained on
                lines["train"] = np.sort(np.concatenate([lines["train"], lines[split]]))
                lines[split] = filled[split]
        for split, places in lines.items():
            if not len(places):
                source = self._source(split)
                raise UserError(f"{source.key}={source.path} has empty lines only.")
        return lines

    def _line_windows(
        self, tokens: Tokens, lines: NDArray[np.int64], source: Source
    ) -> LineWindows:
        windows = LineWindows(tokens, lines, self.length, self.tokenizer.end_id)
        is_cut = windows.sizes + 1 > self.length
        if is_cut.any() and global_rank() == 0:
            log.warning(
                "%s: %d of %d lines are cut, of up to %d tokens; data.length=%d would take all.",
                source.path,
                is_cut.sum(),
                len(lines),
                windows.sizes.max(),
                windows.sizes.max() + 1,
            )
        return windows

    def _chosen_tokenizer(self) -> Tokenizer:
        """The tokenizer that the settings ask for."""
        if self.tokenizer_name != "bytes":
            return tokenizers.read(self.tokenizer_name, self.end_token)
        if self.end_token is not None:
            raise UserError("data.end_token is a token of data.tokenizer: name both or neither.")
        return Bytes()
