"""Public packages' modules by YAML alone: make packages."""

import importlib.util
from pathlib import Path

import pytest

from tests.packages.expected import COLUMNS, PACKAGES
from tests.verdicts.table import read

NEEDED = ("chemprop", "deeptab", "gluonts", "gymnasium", "nequip", "pytorch_forecasting", "rl4co")
CONF = Path(__file__).with_name("conf") / "experiment"


@pytest.fixture(scope="module", params=PACKAGES)
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The cells of one public module."""
    if not all(importlib.util.find_spec(name) for name in NEEDED):
        pytest.skip("make packages sets up an environment with the packages")
    from tests.packages.cells import Cells  # imports what only make packages installs

    folder: Path = tmp_path_factory.mktemp(request.param)
    return Cells(request.param, folder)


@pytest.mark.packages
@pytest.mark.parametrize("column", COLUMNS)
def test_cell_is_what_the_table_says(cells, column: str) -> None:
    cells.check(column)


def test_every_public_module_has_a_yaml_file_and_a_verdict_in_every_column() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == PACKAGES.keys()
    cells = {key[1:] for key in read() if key[0] == "public"}
    assert cells == {(name, column) for name in PACKAGES for column in COLUMNS}
