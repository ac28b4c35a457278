"""The suite finds twelve faults that no user must ever meet."""

from pathlib import Path

import pytest

from tests.conftest import slow
from tests.planted_faults import FAULTS, is_found, misplaced


def test_each_fault_has_its_place_in_the_harness() -> None:
    assert not misplaced()


@pytest.mark.parametrize("name", slow(*FAULTS))
@pytest.mark.timeout(1800)
def test_a_planted_fault_turns_the_suite_red(name: str, tmp_path: Path) -> None:
    assert is_found(FAULTS[name], tmp_path)
