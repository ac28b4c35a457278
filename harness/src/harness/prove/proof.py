"""Every way to run an experiment, held against one process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from harness.errors import UserError
from harness.prove.compare import BY_BIT, DOUBLE, SINGLE, Difference, differences
from harness.prove.record import Record
from harness.prove.runs import ALONE, HANGS, Ended, Runs, strategy

EQUAL, TOLD, REFUSED, SKIPPED = "equal", "told", "refused", "not tried"
DIFFERS, FAILS = "DIFFERS", "FAILS"
STRATEGIES = ("dp(2)", "ddp(2)", "ddp(3)", "ddp2(2x2)")
FIRST, RESUME, ELSEWHERE = "first batch", "resume", "resume elsewhere"
NUDGE = 1e-7  # a rounding of single precision


@dataclass(frozen=True)
class Verdict:
    """Of one way to run the experiment: one of the six words, why, and by how much each name."""

    name: str
    verdict: str
    said: str
    differences: dict[str, Difference] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains all differences."""
        return self.verdict == EQUAL

    @property
    def is_broken(self) -> bool:
        """Whether it fails, or differs and the run itself has not said so."""
        return self.verdict in (DIFFERS, FAILS)

    def __str__(self) -> str:
        return f"{self.name}: {self.verdict}: {self.said}"


@dataclass
class Proof:
    """What holds for an experiment."""

    experiment: str
    settings: str
    verdicts: list[Verdict]
    notes: list[str]  # what one process has warned of


def prove(
    runs: Runs,
    strategies: Sequence[str] = STRATEGIES,
    tell: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Train an experiment for a few steps in many ways, and compare each with one process.

    Args:
        runs: starts them.
        strategies: names such as ``ddp(2)`` or ``ddp2(2x2)``.
        tell: is told what is being run.

    Raises:
        UserError: if one process does not train.
    """
    chosen, began = [strategy(name) for name in strategies], time.monotonic()
    judge = Judge(runs, tell, check=not all(name.startswith("dp(") for name in strategies))
    found = [judge.first]
    for how in chosen:
        tell(how.name)
        found.append(judge.verdict(how.name, runs.start(how.name, how)))
    equal = {one.name for one in found if one.is_equal}
    several = [how for how in chosen if how.name in equal and not how.name.startswith("dp(")]
    tell("a run that is killed")
    killed = runs.start("killed", ALONE, kill_after=runs.num_steps - 1)
    tell("and resumed")
    found.append(judge.verdict(RESUME, runs.resume(RESUME, killed, ALONE), by_bit=True))
    if several:
        tell(f"and resumed under {several[0].name}")
        found.append(judge.verdict(ELSEWHERE, runs.resume(ELSEWHERE, killed, several[0])))
    else:
        said = "of the strategies that were tried none has several processes and is equal"
        found.append(Verdict(ELSEWHERE, SKIPPED, said))
    seconds = time.monotonic() - began
    settings = f"{runs.num_steps} steps, {runs.accelerator}, {runs.precision}, {seconds:.0f} s"
    return Proof(" ".join(runs.typed), settings, found, judge.reference.warnings)


class Judge:
    """Compares what has ended with one process.

    Args:
        runs: of the experiment.
        tell: is told what is being run.
        check: whether what several processes make of the first batches is computed as well.

    Raises:
        UserError: if one process does not train.
    """

    def __init__(self, runs: Runs, tell: Callable[[str], None], check: bool) -> None:
        self.runs, self.tell = runs, tell
        tell("one process")
        began = time.monotonic()
        ended = runs.start("one process", ALONE, check=check)
        if ended.status and runs.may_round:
            tell("one process in single precision")
            runs.precision = "32-true"
            ended = runs.start("one process in single precision", ALONE, check=check)
        if ended.status:
            raise UserError(ended.sentence)
        runs.timeout = 60 + 10 * (time.monotonic() - began)
        self.reference = Record(ended.run_dir)
        kinds = {kind for kind, _ in self.reference.findings}
        said = "\n".join(sentence for _, sentence in self.reference.findings)
        verdict = DIFFERS if "different" in kinds else TOLD if kinds else EQUAL
        self.first = Verdict(FIRST, verdict, said or "whole and in parts")
        if not check:
            self.first = Verdict(FIRST, SKIPPED, "every step of dp sees whole batches")
        self.is_explained = bool(kinds & {"different", "random"})
        self.tolerance = DOUBLE if runs.precision == "64-true" else SINGLE

    @cached_property
    def control(self) -> dict[str, Difference]:
        """How far a rounding of single precision takes the run, for what computes in that."""
        self.tell("one process whose initial parameters are moved by rounding")
        ended = self.runs.start("control", ALONE, nudge=NUDGE)
        if ended.status:
            return {}
        return differences(self.reference, Record(ended.run_dir), DOUBLE, nudge=NUDGE)

    def verdict(self, name: str, ended: Ended, by_bit: bool = False) -> Verdict:
        """Of a run that has ended."""
        if ended.status == HANGS:
            return Verdict(name, FAILS, f"did not end within {self.runs.timeout:.0f} s")
        if ended.status:
            return Verdict(name, REFUSED if ended.is_refused else FAILS, ended.sentence)
        record, tolerance = Record(ended.run_dir), BY_BIT if by_bit else self.tolerance
        found = differences(self.reference, record, tolerance)
        if not by_bit and not all(one.is_equal for one in found.values()):
            found = differences(self.reference, record, tolerance, self.control)
        worst = max(found, key=lambda key: found[key].rank)
        said = f"{worst} by {found[worst].distance:.1e}"
        if found[worst].is_equal:
            return Verdict(
                name, EQUAL, f"at most {said}" if found[worst].distance else "by bit", found
            )
        said += f", first at step {found[worst].step}"
        news = [text for text in record.warnings if text not in self.reference.warnings]
        is_told = bool(news) or (self.is_explained and not by_bit)
        return Verdict(name, TOLD if is_told else DIFFERS, "\n".join([said, *news]), found)
