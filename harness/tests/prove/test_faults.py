"""Each planted fault is found, with its place and what the run says; without it, all holds."""

import pytest

from harness.prove.promises import Proof
from harness.prove.verdicts import BROKEN, DEFINITION, HOLDS, REFUSED
from tests.conftest import slow
from tests.modules import classifiers, comparing, habits, logged, text
from tests.prove import modules
from tests.prove.conftest import Prove

# Module, its data, the strategy, a promise, its status, what is said of it.
FAULTS = [
    *slow(
        (
            *(logged.Counters, "Flowers", "ddp(2)", "ddp(2)", REFUSED),
            ("val/acc", "is each process's own"),
        ),
        (
            *(modules.CountedTwice, "Flowers", "ddp(3)", "ddp(3)", BROKEN),
            ("val/num", "counted again by each", "SumMetric", "on_validation_epoch_end"),
        ),
        (
            *(modules.Writes, "Flowers", "dp(2)", "dp(2)", BROKEN),
            ("buffer centre", "look at what the step does with a share", "classifiers.py"),
        ),
        (
            *(comparing.Contrastive, "Views", "ddp(2)", "ddp(2)", DEFINITION),
            ("compares the samples of a batch", "Use strategy=dp or ddp2"),
        ),
        (
            *(habits.Mixup, "Flowers", "ddp(2)", "ddp(2)", DEFINITION),
            ("draws random numbers, each process its own",),
        ),
        (
            *(modules.Forgets, "Flowers", "dp(2)", "resume", BROKEN),
            ("step 4", "memory changes in training", 'self.register_buffer("memory", ...)'),
        ),
    ),
    (
        *(text.MaskedLanguage, "Sentences", "ddp(2)", "ddp(2)", BROKEN),
        ("parameter", "step 1", "Say what it is a mean over: return mean_over(loss, number)"),
    ),
]


@pytest.mark.parametrize(
    ("module", "dataset", "strategy", "promise", "status", "said"),
    FAULTS,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_fault_is_found_with_what_is_known_of_it(
    module,
    dataset: str,
    strategy: str,
    promise: str,
    status: str,
    said: tuple[str, ...],
    prove_module: Prove,
) -> None:
    # dp itself refuses the first batch of such a module, unless it is told not to look.
    words = ["trainer.strategy.check_forward=false"] if promise == "dp(2)" else []
    # A checkpoint keeps attributes, unless they are larger than it may become.
    words += ["checkpoint.attribute_megabytes=0"] if promise == "resume" else []
    proof = prove_module(module, strategy, dataset=dataset, more=tuple(words))
    verdict = proof.verdict(promise)
    assert verdict.status == status, str(verdict)
    for part in said:
        assert part in " ".join(str(verdict).split()), str(verdict)
    assert proof.is_broken == (status == BROKEN)
    others = [v for v in proof.verdicts if v.promise not in (promise, "resume elsewhere")]
    assert not [str(v) for v in others if v.status == BROKEN], "only what is planted"


def _all_hold(proof: Proof) -> None:
    left = [v for v in proof.verdicts if v.status != HOLDS]
    assert not left, "\n".join(map(str, left))


@pytest.mark.slow
def test_a_module_without_fault_holds_under_every_strategy(prove_module: Prove) -> None:
    """With dropout, which must be equal by bit after a kill and is off elsewhere."""
    strategies = ("dp(2)", "ddp(2)", "ddp(3)", "ddp2(2x2)")
    proof = prove_module(classifiers.Dropout, *strategies)
    _all_hold(proof)
    assert "dropout (net.1.p=0.2)" in proof.notes[0]


@pytest.mark.slow
def test_batch_norm_is_the_whole_reason_or_is_said_not_to_be(prove_module: Prove) -> None:
    proof = prove_module(classifiers.BatchNorm, "dp(2)", "ddp(2)")
    for strategy in ("dp(2)", "ddp(2)"):
        verdict = proof.verdict(strategy)
        assert verdict.status == DEFINITION
        assert "BatchNorm (net.1) sees a share of the batch; frozen, all is equal" in str(verdict)
    assert proof.verdict("ddp(2)").line == "trainer.sync_batchnorm=true"
    verdict = prove_module(modules.SumWithBatchNorm, "ddp(2)").verdict("ddp(2)")
    assert verdict.status == BROKEN
    assert "BatchNorm is not the whole reason; the run says: The loss" in str(verdict)
    _all_hold(prove_module(classifiers.BatchNorm, "ddp(2)", more=("trainer.sync_batchnorm=true",)))
