"""Public packages' modules by YAML alone, and streams of webdataset: make packages."""

import importlib.util
import itertools
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from harness.data.streams import StreamPart
from tests.loaders import libraries
from tests.packages.cells import COLUMNS, PACKAGES, Cells
from tests.verdicts.cells import row
from tests.verdicts.table import read

NEEDED = (
    *("chemprop", "deeptab", "gluonts", "nequip", "peft", "pytorch_forecasting", "rl4co"),
    "transformers",
)
CONF = Path(__file__).with_name("conf") / "experiment"


@pytest.fixture(scope="module", params=PACKAGES)
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """The cells of one public module."""
    if not all(importlib.util.find_spec(name) for name in NEEDED):
        pytest.skip("make packages sets up an environment with the packages")
    from tests.packages import made_up_data  # imports what only make packages installs

    folder: Path = tmp_path_factory.mktemp(request.param)
    made_up_data.write_files(folder / "data")
    return Cells(request.param, folder)


@pytest.mark.packages
@pytest.mark.parametrize("column", COLUMNS)
def test_cell_is_what_the_table_says(cells: Cells, column: str) -> None:
    cells.check(column)


def test_every_public_module_has_a_yaml_file_and_a_verdict_in_every_column() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == PACKAGES.keys()
    rows = [row for row in read().values() if row.group == "public"]
    assert {row[1:3] for row in rows} == {*itertools.product(PACKAGES, COLUMNS)}
    assert {row.verdict for row in rows} <= {"equal", "told", "refused"}
    assert all(row.says for row in rows if row.verdict != "equal")


@pytest.fixture
def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return files that all runs of a test read, also resumed runs."""
    pytest.importorskip("webdataset")
    monkeypatch.setenv("LOADERS_FOLDER", str(tmp_path))
    libraries.write_tars(tmp_path)


@pytest.mark.packages
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["webdataset", "webdataset, workers=2"])
def test_parts_of_webdataset_are_read_once_and_resumed(name: str, tars: None) -> None:
    found = row("loader", name, ("cpu", "ddp(2)"))
    verdicts = {strategy: cell.verdict for strategy, cell in found.items()}
    resumed = {"cpu, resumed": "equal", "ddp(2), resumed": "equal"}
    assert verdicts == {"cpu": "equal", "ddp(2)": "told", **resumed}
    assert "other samples than with one process" in found["ddp(2)"].said


@pytest.mark.packages
@pytest.mark.filterwarnings("default")
def test_a_stream_that_webdataset_does_not_split_is_refused(tars: None) -> None:
    cell = row("loader", "webdataset whole", ("ddp(2)",))["ddp(2)"]
    assert cell.verdict == "refused"
    assert "you need to add an explicit nodesplitter" in cell.said


@pytest.mark.packages
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "package"), [("Tars", "webdataset"), ("Chunks", "litdata"), ("Lines", "datasets")]
)
def test_recipes_of_the_page_of_streams_are_read_once_and_resumed(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of docs/streams.md, for one process and two, resumed inside of the second epoch."""
    pytest.importorskip(package)
    monkeypatch.setenv("LOADERS_FOLDER", str(tmp_path))
    libraries.write_splits(name, tmp_path)
    data = libraries.recipe(name)
    orders = []
    for epoch in range(2):
        parts = []
        for rank in range(2):
            part = StreamPart(data.make_dataset("train"), seed=0, num_ranks=2, rank=rank)
            part.set_epoch(epoch)
            loader = DataLoader(part, batch_size=None)
            parts.append([float(sample["target"]) for sample in loader])
        orders.append(parts[0])
        values = parts[0] + parts[1]
        assert min(map(len, parts)) > 24
        assert len({*values}) == len(values) == libraries.NUM_SAMPLES
    assert orders[0] != orders[1]
    found = row("loader", name, ("cpu", "ddp(2)"))
    verdicts = {strategy: cell.verdict for strategy, cell in found.items()}
    resumed = {"cpu, resumed": "equal", "ddp(2), resumed": "equal"}
    assert verdicts == {"cpu": "equal", "ddp(2)": "told", **resumed}, {
        strategy: cell.said[-800:] for strategy, cell in found.items()
    }
    assert "other samples than with one process" in found["ddp(2)"].said
