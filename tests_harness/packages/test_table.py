"""The page of public modules, which needs none of them."""

from pathlib import Path

from tests_harness.packages.expected import COLUMNS, PACKAGES
from tests_harness.packages.table import PAGE, page

CONF = Path(__file__).with_name("conf") / "experiment"


def test_page_shows_the_cells_that_are_tested() -> None:
    """python -m tests_harness.packages.table writes it."""
    assert PAGE.read_text() == page()


def test_every_module_has_its_yaml_file_and_its_row() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == PACKAGES.keys()
    assert all(package.cells.keys() <= COLUMNS.keys() for package in PACKAGES.values())
