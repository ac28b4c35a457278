"""Packed sequences, split and joined by sample."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from harness.errors import UserError


def narrow_packed(packed: PackedSequence, start: int, length: int) -> PackedSequence:
    """Copy `length` sequences, in the order in which they were packed."""
    rows = slice(start, start + length)
    padded, lengths = pad_packed_sequence(packed, batch_first=True)  # (B, T, ...), (B,)
    is_sorted = packed.sorted_indices is None
    return pack_padded_sequence(padded[rows], lengths[rows], True, enforce_sorted=is_sorted)


def join_packed(parts: Sequence[PackedSequence]) -> PackedSequence:
    """Pack the sequences of all parts together, where the first one is.

    Raises:
        UserError: each part is sorted by length, and all together are not.
    """
    device = parts[0].data.device
    longest = max(len(part.batch_sizes) for part in parts)
    here = [part.to(device) for part in parts]  # type: ignore[arg-type]  # torch says: a dtype
    pairs = [pad_packed_sequence(part, True, total_length=longest) for part in here]
    padded, lengths = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
    is_sorted = all(part.sorted_indices is None for part in parts)
    if is_sorted and bool((lengths.diff() > 0).any()):
        raise UserError(
            "forward() returned packed sequences which each device has sorted for itself.\n"
            "Pack them with enforce_sorted=False, which keeps the order of the samples."
        )
    return pack_padded_sequence(padded, lengths, True, enforce_sorted=is_sorted)
