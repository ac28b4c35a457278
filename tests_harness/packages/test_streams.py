"""Streams of webdataset and litdata: make packages."""

from typing import Any

import pytest

from tests_harness.loaders.test_any_loader import cells

pytestmark = pytest.mark.packages


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["webdataset", "litdata"])
def test_parts_of_a_librarys_stream_are_read_once_and_resumed(kind: str, num_workers: int) -> None:
    found: dict[str, Any] = cells((kind,), ("cpu", "ddp(2)"), "--real", f"--workers={num_workers}")[
        kind
    ]
    for strategy, cell in found.items():
        assert cell["status"] == 0, cell["said"]
        assert cell["resumed"]["status"] == 0, cell["resumed"]["said"]
        assert cell["resumed"]["differences"] == []
        said = "others than one process would take" in cell["said"]
        assert said == (strategy == "ddp(2)")


def test_a_stream_that_webdataset_does_not_split_is_refused() -> None:
    cell = cells(("webdataset whole",), ("ddp(2)",), "--real")["webdataset whole"]["ddp(2)"]
    assert cell["status"] == 1
    assert "you need to add an explicit nodesplitter" in cell["said"]
    assert "Traceback" not in cell["said"]
