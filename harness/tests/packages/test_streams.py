"""Streams of webdataset: make packages."""

import pytest

from tests.verdicts.cells import row

pytestmark = pytest.mark.packages
TOLD = "others than one process would take"


def test_parts_of_webdataset_are_read_once_and_resumed() -> None:
    pytest.importorskip("webdataset")
    for name in ("webdataset", "webdataset, workers=2"):
        found = row("loader", name, ("cpu", "ddp(2)"), forks=False)
        verdicts = {strategy: cell.verdict for strategy, cell in found.items()}
        resumed = {"cpu, resumed": "equal", "ddp(2), resumed": "equal"}
        assert verdicts == {"cpu": "equal", "ddp(2)": "told", **resumed}, name
        assert TOLD in found["ddp(2)"].said


def test_a_stream_that_webdataset_does_not_split_is_refused() -> None:
    pytest.importorskip("webdataset")
    cell = row("loader", "webdataset whole", ("ddp(2)",), forks=False)["ddp(2)"]
    assert cell.verdict == "refused"
    assert "you need to add an explicit nodesplitter" in cell.said
