"""A stream that is shared; how every kind of loader ends is in tests/verdicts."""

import copy

import pytest
import torch

from harness.data.stream_parts import fingerprint
from harness.data.streams import SharedStream
from harness.errors import UserError


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


def test_workers_that_read_the_same_are_refused() -> None:
    """Each of their first batches says how its part begins."""
    batches = [(2, 7, "of a worker"), (2, 7, "of another one")]
    stream = SharedStream(batches, "batches", num_ranks=1, seed=0, batch_size=2)
    with pytest.raises(UserError, match="gives every process or worker the same samples"):
        list(stream)


def test_a_stream_that_ends_before_the_place_to_go_on_is_refused() -> None:
    stream = SharedStream([torch.ones(2)] * 3, "batches", num_ranks=1, seed=0)
    stream.start_at(0, 4)
    with pytest.raises(UserError, match="ended after 3 batches"):
        list(stream)
