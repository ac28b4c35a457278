"""Each planted fault is found, with its place and what the run says; without it, all is equal."""

from typing import Any

import pytest

from harness.prove.compare import DIFFERS, EQUAL, FAILS, FIRST, REFUSED, SKIPPED, TOLD, Verdict
from tests.conftest import slow
from tests.modules import classifiers, habits, logged, text
from tests.prove import modules
from tests.prove.conftest import Prove

# Module, its data, the strategy, the row of the table, its verdict, what it says.
FAULTS = [
    (text.MaskedLanguage, "Sentences", "ddp(2)", FIRST, DIFFERS, ("mean_over(loss, number)",)),
    (modules.Forgets, "Flowers", "dp(2)", "resume", DIFFERS, (" by ",)),
    *slow(
        (modules.Crashes, "Flowers", "ddp(2)", "ddp(2)", FAILS, ("shape '[8, 3]' is invalid",)),
        (logged.Counters, "Flowers", "ddp(2)", "ddp(2)", REFUSED, ("is each process's own",)),
        (habits.Mixup, "Flowers", "ddp(2)", "ddp(2)", TOLD, ("random numbers",)),
        (classifiers.BatchNorm, "Flowers", "ddp(2)", "ddp(2)", TOLD, ("sync_batchnorm=true",)),
    ),
]


@pytest.mark.parametrize(
    ("module", "dataset", "strategy", "row", "verdict", "said"),
    FAULTS,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_fault_is_found_with_what_is_known_of_it(
    module: type[Any],
    dataset: str,
    strategy: str,
    row: str,
    verdict: str,
    said: tuple[str, ...],
    prove_module: Prove,
) -> None:
    found = prove_module(module, strategy, dataset=dataset)
    assert found[row].verdict == verdict, str(found[row])
    for part in said:
        assert part in " ".join(str(found[row]).split()), str(found[row])
    if row == FIRST:
        assert found[strategy].verdict == TOLD, str(found[strategy])
    else:
        assert not found[FIRST].is_broken, str(found[FIRST])


def assert_equal(verdicts: dict[str, Verdict]) -> None:
    left = [str(one) for one in verdicts.values() if one.verdict not in (EQUAL, SKIPPED)]
    assert not left, "\n".join(left)


@pytest.mark.slow
def test_a_module_without_fault_is_equal_under_every_strategy(prove_module: Prove) -> None:
    """With dropout, which is off in all runs."""
    assert_equal(prove_module(classifiers.Dropout, "dp(2)", "ddp(2)", "ddp(3)", "ddp2(2x2)"))


@pytest.mark.slow
def test_batch_norm_that_is_synchronised_is_equal(prove_module: Prove) -> None:
    more = ("trainer.sync_batchnorm=true",)
    assert_equal(prove_module(classifiers.BatchNorm, "ddp(2)", more=more))
