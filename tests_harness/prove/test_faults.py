"""Each planted fault is found, with its place and its reason; without the fault, all holds."""

import pytest

from harness.prove.promises import Proof
from harness.prove.verdicts import BROKEN, DEFINITION, HOLDS, REFUSED
from tests_harness.prove import modules
from tests_harness.prove.conftest import Prove

NAMES = {
    # Module, strategy, how the data comes, promise, its status, what is said of it.
    "token mean": (
        *(modules.Tokens, "ddp(2)", "sequences", "ddp(2)", BROKEN),
        ("net.0.", "step 1", "something else than samples", "mean_over(loss, ", "modules.py"),
    ),
    "wrong declaration": (
        *(modules.WronglyDeclared, "ddp(2)", "sequences", "ddp(2)", BROKEN),
        ("what mean_over was told", "something else than samples"),
    ),
    "sum": (*(modules.Summed, "ddp(2)", "points", "ddp(2)", BROKEN), ("a sum over samples",)),
    "two terms": (
        *(modules.TwoTerms, "ddp(2)", "sequences", "ddp(2)", BROKEN),
        ("terms that are means over different things",),
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
        ("buffer centre", "centre is written from the samples of one device"),
    ),
    "written by one process": (
        *(modules.Writes, "ddp(2)", "points", "ddp(2)", BROKEN),
        ("buffer centre", "centre is written from the samples of one process"),
    ),
    "InfoNCE": (
        *(modules.Contrastive, "ddp(2)", "points", "ddp(2)", DEFINITION),
        ("looks at the whole batch", "strategy=ddp2"),
    ),
    "noise": (
        *(modules.Noisy, "ddp(2)", "points", "ddp(2)", DEFINITION),
        ("draws its own random numbers", "randn_like at", "modules.py"),
    ),
    "forgotten tensor": (
        *(modules.Forgets, "dp(2)", "points", "resume", BROKEN),
        ("step 4", "memory changes in training", 'self.register_buffer("memory", ...)'),
    ),
    "list that is kept": (
        *(modules.KeepsList, "dp(2)", "points", "resume", BROKEN),
        ("val/mean", "len(seen) changes in training", "clear it each epoch"),
    ),
}
QUICK = {"token mean", "forgotten tensor"}
CASES = [
    pytest.param(*case, id=name, marks=[] if name in QUICK else pytest.mark.slow)
    for name, case in NAMES.items()
]
COLUMNS = ("module", "strategy", "kind", "promise", "status", "said")


@pytest.mark.parametrize(COLUMNS, CASES)
def test_a_planted_fault_is_found_with_its_reason(
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
        assert text in str(verdict)
    assert proof.is_broken == (status == BROKEN)
    others = [v for v in proof.verdicts if v.promise not in (promise, "resume elsewhere")]
    assert not [str(v) for v in others if v.status == BROKEN], "only what is planted"


@pytest.mark.slow
@pytest.mark.parametrize("module", [modules.Forgets, modules.KeepsList, modules.OwnGenerator])
def test_attributes_that_a_checkpoint_keeps_are_no_fault(module, prove_module: Prove) -> None:
    assert prove_module(module, "ddp(2)", fault=True).verdict("resume").status == HOLDS


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
def test_batch_norm_is_the_whole_reason(prove_module: Prove) -> None:
    proof = prove_module(modules.Normalised, "dp(2)", "ddp(2)", fault=False)
    for strategy in ("dp(2)", "ddp(2)"):
        verdict = proof.verdict(strategy)
        assert verdict.status == DEFINITION
        assert "BatchNorm (net.1) sees a share of the batch; frozen, all is equal" in str(verdict)
    assert proof.verdict("ddp(2)").line == "trainer.sync_batchnorm=true"
    assert not proof.is_broken


@pytest.mark.slow
def test_synchronised_batch_norm_holds(prove_module: Prove) -> None:
    words = ["trainer.sync_batchnorm=true"]
    _all_hold(prove_module(modules.Normalised, "ddp(2)", fault=False, words=words))


@pytest.mark.slow
def test_a_fault_beside_batch_norm_is_not_put_down_to_it(prove_module: Prove) -> None:
    verdict = prove_module(modules.Normalised, "ddp(2)", fault=True).verdict("ddp(2)")
    assert verdict.status == BROKEN
    assert "BatchNorm is not the whole reason; likely: the loss is a sum" in str(verdict)
