"""Each planted fault is found, with its place and what the run says; without it, all holds."""

import pytest

from harness.prove.promises import Proof
from harness.prove.verdicts import BROKEN, DEFINITION, HOLDS, REFUSED
from tests_harness.prove import modules
from tests_harness.prove.conftest import Prove

NAMES = {
    # Module, strategy, how the data comes, promise, its status, what is said of it.
    "token mean": (
        *(modules.Tokens, "ddp(2)", "sequences", "ddp(2)", BROKEN),
        ("net.0.", "step 1", "Say what it is a mean over: return mean_over(loss, number)"),
    ),
    "counted by hand": (
        *(modules.Counted, "ddp(2)", "points", "ddp(2)", REFUSED),
        ("val/share", "is each process's own"),
    ),
    "counted twice": (
        *(modules.CountedTwice, "ddp(3)", "points", "ddp(3)", BROKEN),
        ("val/num", "counted again by each", "SumMetric", "on_validation_epoch_end"),
    ),
    "forward writes": (
        *(modules.Writes, "dp(2)", "points", "dp(2)", BROKEN),
        ("buffer centre", "look at what the step does with a share", "modules.py"),
    ),
    "InfoNCE": (
        *(modules.Contrastive, "ddp(2)", "points", "ddp(2)", DEFINITION),
        ("compares the samples of a batch", "Use strategy=dp or ddp2"),
    ),
    "noise": (
        *(modules.Noisy, "ddp(2)", "points", "ddp(2)", DEFINITION),
        ("draws random numbers, each process its own",),
    ),
    "forgotten tensor": (
        *(modules.Forgets, "dp(2)", "points", "resume", BROKEN),
        ("step 4", "memory changes in training", 'self.register_buffer("memory", ...)'),
    ),
}
QUICK = {"token mean"}
CASES = [
    pytest.param(*case, id=name, marks=[] if name in QUICK else pytest.mark.slow)
    for name, case in NAMES.items()
]
COLUMNS = ("module", "strategy", "kind", "promise", "status", "said")


@pytest.mark.parametrize(COLUMNS, CASES)
def test_a_planted_fault_is_found_with_what_is_known_of_it(
    module,
    strategy: str,
    kind: str,
    promise: str,
    status: str,
    said: tuple[str, ...],
    prove_module: Prove,
) -> None:
    # dp itself refuses the first batch of such a module, unless it is told not to look.
    words = ["trainer.strategy.check_forward=false"] if promise == "dp(2)" else []
    # A checkpoint keeps attributes, unless they are larger than it may become.
    words += ["checkpoint.attribute_megabytes=0"] if promise == "resume" else []
    proof = prove_module(module, strategy, fault=True, kind=kind, words=words)
    verdict = proof.verdict(promise)
    assert verdict.status == status, str(verdict)
    for text in said:
        assert text in " ".join(str(verdict).split()), str(verdict)
    assert proof.is_broken == (status == BROKEN)
    others = [v for v in proof.verdicts if v.promise not in (promise, "resume elsewhere")]
    assert not [str(v) for v in others if v.status == BROKEN], "only what is planted"


@pytest.mark.slow
@pytest.mark.parametrize(COLUMNS[:3], [pytest.param(*c[:3], id=n) for n, c in NAMES.items()])
def test_without_the_fault_all_holds(module, strategy: str, kind: str, prove_module: Prove) -> None:
    proof = prove_module(module, strategy, fault=False, kind=kind)
    _all_hold(proof, but=("resume elsewhere",) if strategy == "dp(2)" else ())


def _all_hold(proof: Proof, but: tuple[str, ...] = ()) -> None:
    left = [v for v in proof.verdicts if v.status != HOLDS and v.promise not in but]
    assert not left, "\n".join(map(str, left))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_a_module_without_fault_holds_under_every_strategy(
    precision: str, prove_module: Prove
) -> None:
    """With dropout, which must be equal by bit after a kill and is off elsewhere."""
    strategies = ("dp(2)", "ddp(2)", "ddp(3)", "ddp2(2x2)")
    proof = prove_module(modules.Points, *strategies, fault=False, dropout=0.3, precision=precision)
    _all_hold(proof)
    assert "dropout (net.2.p=0.3)" in proof.notes[0]


@pytest.mark.slow
def test_batch_norm_is_the_whole_reason_or_is_said_not_to_be(prove_module: Prove) -> None:
    proof = prove_module(modules.Normalised, "dp(2)", "ddp(2)", fault=False)
    for strategy in ("dp(2)", "ddp(2)"):
        verdict = proof.verdict(strategy)
        assert verdict.status == DEFINITION
        assert "BatchNorm (net.1) sees a share of the batch; frozen, all is equal" in str(verdict)
    assert proof.verdict("ddp(2)").line == "trainer.sync_batchnorm=true"
    verdict = prove_module(modules.Normalised, "ddp(2)", fault=True).verdict("ddp(2)")
    assert verdict.status == BROKEN
    assert "BatchNorm is not the whole reason; the run says: The loss" in str(verdict)
    words = ["trainer.sync_batchnorm=true"]
    _all_hold(prove_module(modules.Normalised, "ddp(2)", fault=False, words=words))
