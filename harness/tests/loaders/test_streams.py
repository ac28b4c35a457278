"""A stream that is shared; how every kind of loader ends is in tests/verdicts."""

import copy

import torch

from harness.data.stream_parts import fingerprint
from harness.data.streams import SharedStream


def test_a_batch_without_an_element_is_not_the_end_of_a_stream() -> None:
    batches = [{"inputs": torch.zeros(0, 3)}, {"inputs": torch.ones(2, 3)}]
    assert len(list(SharedStream(batches, "batches", num_ranks=1, seed=0))) == 2


def test_a_batch_that_is_changed_in_place_is_still_known() -> None:
    """An augmentation may do so while the batch is moved, before a checkpoint is written."""
    batches = [{"inputs": torch.ones(2)}, {"inputs": torch.zeros(2)}]
    stream = SharedStream(copy.deepcopy(batches), "batches", num_ranks=1, seed=0)
    for batch in stream:
        batch["inputs"] = batch["inputs"] + 1
    for number, batch in enumerate(batches):
        assert stream.state(0, number)["comes"] == fingerprint(batch)
