"""Modules that know nothing of this project end as in one process, or say why they do not."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests_harness.conftest import ROOT
from tests_harness.modules.cells import is_expected, table
from tests_harness.modules.kinds import KINDS
from tests_harness.strategy_runs import STRATEGIES

# Each is decided in another place of the harness.
IN_PROCESSES = (
    "class weights, `mean_over`",
    "unfrozen by `BaseFinetuning`",
    "unfrozen and frozen by hooks",
    "unfrozen in the step",
    "accumulated, `mean_over`",
    "shares without a label, `mean_over`",
    "graphs as dicts",
    "contrastive, gathered (SimCLR)",
    "two validation loaders",
    "collected in lists",
    "counted by hand",
    "lists and counters, gathered",
    "statistics of the training data",
    "max, min and sum of steps",
)
# Four batches: two of three processes repeat one at the end, and forget it.
WITH_FILLERS = ("counted by hand, gathered", "gathered as objects by the author")
IN_REPLICAS = ("time first", "mask as long as the batch", "queue written by forward (MoCo)")


def cells(kinds: tuple[str, ...], *strategies: str) -> dict[str, Any]:
    """What came of each kind under each strategy, found out by one process."""
    command = [sys.executable, "-m", "tests_harness.modules.cells", "--json", *kinds]
    command += [f"--strategy={name}" for name in strategies]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any]) -> None:
    for kind, row in found.items():
        for strategy, one in row.items():
            expected = KINDS[kind].expected(strategy)
            assert is_expected(expected, one), f"{kind}, {strategy}: {one['cell']}\n{one['said']}"


def test_two_processes_end_as_one_does() -> None:
    check(cells(IN_PROCESSES, "ddp(2)"))


def test_three_processes_end_as_one_does_where_one_has_fewer_batches() -> None:
    check(cells(WITH_FILLERS, "ddp(3)"))


def test_two_replicas_end_as_one_module_does() -> None:
    check(cells(IN_REPLICAS, "dp(2)"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_module_ends_as_in_one_process_or_says_so(kind: str) -> None:
    check(cells((kind,), *STRATEGIES))


def test_the_table_of_the_docs_is_what_the_kinds_expect() -> None:
    assert table() in (ROOT / "docs" / "strategies.md").read_text()


def test_a_cell_that_nobody_expects_is_seen() -> None:
    """The planted faults: another value, a refusal without its sentence, a run that hangs."""
    trained = {"said": "", "settings": []}
    assert is_expected("", trained | {"cell": ""})
    for cell in ("DIFFERENT: net.weight 1.0e-03 (1)", "refused: text", "HANG", "TRACEBACK: x"):
        assert not is_expected("", trained | {"cell": cell})
    refused = {"cell": "refused: use modules=[net]", "said": "use modules=[net]", "settings": []}
    assert is_expected("refused: modules", refused)
    assert not is_expected("refused: whole_inputs", refused)
    assert not is_expected("different: modules", refused)
