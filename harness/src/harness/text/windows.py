"""Windows of token ids: a batch has inputs and, at each place, the token that comes next.

Both have the shape (B, length). What is padded has the label -100, and stands at the end, where a
network that looks back alone never sees it.
"""

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from harness.data.batches import Batch, BatchedDataset
from harness.data.randomness import uniform
from harness.text.cache import Tokens

IGNORED = -100  # the label that torch's losses leave out


class CorpusWindows(BatchedDataset):
    """A text cut into blocks: each of its tokens but the first is the label of one place.

    The last block is padded. With ``moves`` the text is a ring that each epoch cuts elsewhere.

    Args:
        tokens: of the text, at least two.
        length: tokens of a window.
        pad_id: the input that fills up the last block.
        moves: whether the blocks begin at other tokens in each epoch.
        seed: decides, with the epoch, at which.
    """

    def __init__(
        self, tokens: Tokens, length: int, pad_id: int, moves: bool = False, seed: int = 0
    ) -> None:
        self.tokens, self.length, self.pad_id = tokens, length, pad_id
        self.files = tokens.files
        self.moves, self.seed = moves, seed
        self.num_labels = len(tokens.ids) - 1

    def __len__(self) -> int:
        return -(-self.num_labels // self.length)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Read inputs and labels of shape (B, length)."""
        ids, length, num_labels = self.tokens.ids, self.length, self.num_labels
        firsts = np.asarray(indices) * length
        sizes = np.minimum(length, num_labels - firsts)
        if self.moves:
            epoch = indices.epoch if isinstance(indices, Batch) else 0
            firsts += int(uniform(self.seed, epoch, [0], 1)[0, 0] * num_labels)
            firsts %= num_labels
        is_whole = (sizes == length) & (firsts + length <= num_labels)
        found = np.zeros((len(firsts), length + 1), ids.dtype)
        if is_whole.any():
            found[is_whole] = sliding_window_view(ids, length + 1)[firsts[is_whole]]
        inputs, labels = found[:, :-1].astype(np.int64), found[:, 1:].astype(np.int64)
        for row in np.flatnonzero(~is_whole):  # two of an epoch: the last, and across the ends
            inputs[row], labels[row] = self.pad_id, IGNORED
            places = (firsts[row] + np.arange(sizes[row])) % num_labels
            inputs[row, : sizes[row]], labels[row, : sizes[row]] = ids[places], ids[places + 1]
        return torch.from_numpy(inputs), torch.from_numpy(labels)


class LineWindows(BatchedDataset):
    """A window for each line.

    A line begins with ``end_id`` as input and ends with it as label. Of one that is too long the
    first ``length`` labels are kept.

    Args:
        tokens: of all lines.
        lines: positions of those to take, shape (N,).
        length: tokens of a window.
        end_id: stands before and after each line, and fills up a window.
    """

    def __init__(self, tokens: Tokens, lines: NDArray[np.int64], length: int, end_id: int) -> None:
        self.tokens, self.length, self.end_id = tokens, length, end_id
        self.files = tokens.files
        starts, sizes = line_places(tokens)
        self.starts, self.sizes = starts[lines], sizes[lines]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Read inputs and labels of shape (B, length)."""
        lines = np.asarray(indices)
        starts, sizes = self.starts[lines, None], self.sizes[lines, None]
        places = np.arange(self.length)
        is_text = places < sizes  # (B, length)
        labels = np.where(places == sizes, self.end_id, IGNORED)
        labels[is_text] = self.tokens.ids[(starts + places)[is_text]]
        # The input is the label before.
        inputs = np.roll(labels, 1, axis=1)
        inputs[:, 0] = self.end_id
        inputs[inputs == IGNORED] = self.end_id
        return torch.from_numpy(inputs), torch.from_numpy(labels)


def line_places(tokens: Tokens) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each line begins in the ids, and how many it has."""
    assert tokens.ends is not None
    sizes = np.diff(tokens.ends, prepend=0)
    return tokens.ends - sizes, sizes
