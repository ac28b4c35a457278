"""The library's verdicts equal those of the table; nothing becomes silently different."""

import warnings
from collections.abc import Iterator

import pytest

from tests.conftest import LIBRARY, ci
from tests.verdicts.cells import BARE, GROUPS, Cell, End, judge, row, strategies_of
from tests.verdicts.table import Row, change, is_worse, read

TABLE = read()
# Another place of the library decides each of these.
TELLING = [
    ("module", "collected in lists", "ddp(2)"),
    ("module", "counted by hand", "ddp(2)"),
    # Four batches: two of three processes repeat one at the end, and forget it.
    ("module", "gathered as objects by the user", "ddp(3)"),
    ("module", "queue written by forward (MoCo)", "dp(2)"),
    ("loader", "several", "ddp(2)"),
    ("loader", "own order", "ddp(2)"),
    *ci(
        ("module", "masked language", "ddp(2)"),
        ("module", "unfrozen and frozen by hooks", "ddp(2)"),
        ("module", "statistics of the training data", "ddp(2)"),
        ("module", "the same part twice, reentrant", "ddp(2)"),
        ("module", "contrastive, gathered (SimCLR)", "ddp(2)"),
        ("module", "mask as long as the batch", "dp(2)"),
        ("loader", "by tokens", "ddp(2)"),
        ("loader", "stream with state", "ddp(2)"),
    ),
]


@pytest.fixture(autouse=True)
def warnings_of_a_user() -> Iterator[None]:
    """Commands are forked from here, and to a user a warning is no error."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield


def check(group: str, kind: str, *strategies: str) -> None:
    found = row(group, kind, strategies)
    changes = {
        said: cell.said
        for strategy, cell in found.items()
        if (said := change(TABLE[group, kind, strategy], cell))
    }
    assert not changes, "\n".join([*changes, *changes.values()])


@pytest.mark.parametrize(("group", "kind", "strategy"), TELLING, ids=lambda cell: cell)
def test_a_telling_cell_is_as_the_table_says(group: str, kind: str, strategy: str) -> None:
    check(group, kind, strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "kind"), [(group, kind) for group, kinds in GROUPS.items() for kind in kinds]
)
def test_every_module_and_loader_is_as_the_table_says(group: str, kind: str) -> None:
    check(group, kind, *strategies_of(group))


def test_the_table_has_a_verdict_for_every_kind_under_every_strategy() -> None:
    for group, kinds in GROUPS.items():
        cells = {(group, kind, strategy) for kind in kinds for strategy in strategies_of(group)}
        assert cells <= {key for key in TABLE if ", resumed" not in key[2]}
        assert {kind for one, kind, _ in TABLE if one == group} == {*kinds}
    verdicts = {line.verdict for line in TABLE.values()}
    assert verdicts == {"equal", "set", "told", "refused", "silent"}
    assert all(line.says for line in TABLE.values() if line.verdict in ("told", "refused"))


def test_the_docs_count_the_kinds_and_what_is_silent() -> None:
    text = (LIBRARY / "docs" / "strategies.md").read_text()
    assert f"{len(GROUPS['module'])} modules as researchers write them" in text
    silent = [key for key, line in TABLE.items() if line.verdict == "silent"]
    assert [key for key in silent if key[0] == "module"] == []


def test_a_verdict_is_found_by_what_a_run_says_and_ends_with() -> None:
    reference = {"weight": 1.0}
    ends = {
        "equal": End(0, "", {"weight": 1.0}),
        "set": End(0, "", {"weight": 1.0}, ["trainer.strategy.modules=[net]"]),
        "told": End(0, "WARNING: BatchNorm sees only the local batch.", {"weight": 1.1}),
        "silent": End(0, "", {"weight": 1.1}),
        "refused": End(1, "use strategy=ddp"),
    }
    assert {judge(end, lambda: reference).verdict: end for end in ends.values()} == ends
    assert judge(End(0, "", {}), lambda: reference).verdict == "silent"  # it lacks a weight
    assert judge(End(0, "", reference, is_other=True), lambda: reference).verdict == "silent"
    for end in (End(124, ""), End(1, BARE[0]), End(0, BARE[1], reference)):
        assert judge(end, lambda: reference).verdict == "broken"


def test_a_cell_that_becomes_worse_or_is_refused_for_another_reason_is_told() -> None:
    worse = {"equal": ("silent", "told", "refused"), "set": ("refused",), "told": ("silent",)}
    for before, verdicts in (worse | {"refused": ("silent", "broken")}).items():
        line = Row("module", "mine", "ddp(2)", before)
        for now in verdicts:
            cell = Cell(now, "BatchNorm sees only the local batch")
            assert change(line, cell).startswith("WORSE"), (before, now)
    assert not is_worse("silent", "told")
    assert not is_worse("refused", "equal")
    line = Row("module", "mine", "ddp(2)", "refused", "", "use modules=[net]")
    assert not change(line, Cell("refused", "It cannot be:\nuse\n  modules=[net]."))
    assert "is refused: no such key" in change(line, Cell("refused", "no such key"))
