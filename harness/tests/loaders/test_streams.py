"""A stream that is shared; how every kind of loader ends is in tests/verdicts."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from harness.data.streams import SharedStream
from harness.errors import UserError
from tests.loaders.test_shared_batches import shared

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")


class Numbers(IterableDataset[int]):
    """Numbers from 0, with a start that a ``worker_init_fn`` may choose."""

    start = 0

    def __iter__(self) -> Any:
        yield from range(self.start, 6)


class Parts(Numbers):
    """Leaves out what others read."""

    def read_part(self, part: int, num_parts: int) -> None:
        self.part, self.num_parts = part, num_parts

    def __iter__(self) -> Any:
        yield from range(self.part, 12, self.num_parts)


def begin_at_three(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.start = 3  # type: ignore[attr-defined]


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in shared(loader, 1)]


def test_processes_and_workers_read_their_parts() -> None:
    loader = DataLoader(Parts(), 4, num_workers=2)
    assert read(loader) == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10], [9, 11]]
    stream = shared(DataLoader(Parts(), 4), rank=1)
    assert [batch.tolist() for _, batch in stream.loader] == [[1, 3], [5, 7], [9, 11]]


def test_a_stream_without_parts_is_refused_for_several_processes() -> None:
    for loader in (DataLoader(Numbers(), 2), [torch.ones(2)]):
        with pytest.raises(UserError, match="each of 2 processes would read the whole stream"):
            shared(loader)


def test_workers_that_may_read_the_same_are_told_of(capsys) -> None:
    """The user's ``worker_init_fn`` finds the stream itself."""
    loader = DataLoader(Numbers(), 3, num_workers=2, worker_init_fn=begin_at_three)
    assert read(loader) == [[3, 4, 5]] * 2
    assert "each worker reads the whole stream" in capsys.readouterr().out


def test_a_stream_that_ends_before_the_place_to_go_on_is_refused() -> None:
    stream = SharedStream([torch.ones(2)] * 3, "batches")
    stream.start_at(0, 4)
    with pytest.raises(UserError, match="ended after 3 batches"):
        list(stream)
