"""Public packages' modules by YAML alone: make packages."""

from pathlib import Path

import pytest

from tests_harness.packages.expected import COLUMNS, PACKAGES

pytestmark = pytest.mark.packages


@pytest.fixture(scope="module", params=PACKAGES)
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The cells of one public module."""
    from tests_harness.packages.cells import Cells  # imports what only make packages installs

    folder: Path = tmp_path_factory.mktemp(request.param)
    return Cells(request.param, folder)


@pytest.mark.parametrize("column", COLUMNS)
def test_cell_is_what_the_table_says(cells, column: str) -> None:
    cells.check(column)
