"""The promises, one after the other, each held against short runs of the owner's experiment."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.checkpoints import lookup
from harness.errors import UserError
from harness.names import few
from harness.prove import reasons
from harness.prove.records import (
    DOUBLE,
    SINGLE,
    Departure,
    Records,
    Tolerance,
    departures,
    distances,
)
from harness.prove.resuming import forgotten, other_states
from harness.prove.runs import ALONE, Ended, Runs, Strategy, failed_verdict, strategy
from harness.prove.verdicts import (
    BROKEN,
    DEFINITION,
    HOLDS,
    SKIPPED,
    STRATEGIES,
    Proof,
    Verdict,
)

ROUNDING = 1e-7  # by which the weights of a control are moved


def prove(
    words: Sequence[str],
    folder: Path,
    *,
    num_steps: int = 6,
    strategies: Sequence[str] = STRATEGIES,
    precision: str = "auto",
    timeout: float = 600.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Train an experiment for a few steps in many ways, and compare.

    Args:
        words: what train.py takes.
        folder: for the runs.
        num_steps: optimizer steps of each run.
        strategies: names such as ``ddp(2)`` or ``ddp2(2x2)``.
        precision: of the runs; ``auto`` takes 64 bits where the module can.
        timeout: seconds after which a run counts as one that hangs.
        tell: is told what is being done.

    Raises:
        UserError: if the experiment does not train in one process.
    """
    if num_steps < 3:
        raise UserError(f"--steps {num_steps}: use 3 or more, to be killed and to go on.")
    began, chosen = time.monotonic(), [strategy(name) for name in strategies]
    runs = Runs(words, folder, num_steps, timeout)
    proving = Proving(runs, tell, precision)
    proof = proving.proof
    proof.verdicts += [proving.under(how) for how in chosen]
    proof.verdicts += [proving.evaluation(), proving.killed()]
    elsewhere = next((how for how in chosen if how.num_processes > 1), None)
    proof.verdicts.append(proving.elsewhere(elsewhere))
    proof.notes = proving.notes()
    proof.seconds = time.monotonic() - began
    return proof


class Proving:
    """The runs of one proof; those that several promises need run once."""

    def __init__(self, runs: Runs, tell: Callable[[str], None], precision: str) -> None:
        self.runs, self.tell = runs, tell
        self.ended: dict[str, Ended] = {}
        self.departed: dict[str, list[Departure]] = {}
        runs.precision = "64-true" if precision == "auto" else precision
        began = time.monotonic()
        self.reference = self.start("one process", ALONE, dropout=False)
        if self.reference.status and precision == "auto":
            runs.precision = "32-true"
            self.reference = self.start("one process in 32 bits", ALONE, dropout=False)
        if self.reference.status:
            raise UserError(self.reference.sentence)
        # A run that takes much longer than one process hangs.
        runs.timeout = min(runs.timeout, 60 + 10 * (time.monotonic() - began))
        self.facts = self.reference.records.facts
        seen = {*self.facts.get("dtypes", ())}
        is_double = runs.precision == "64-true" and seen <= {"float64"}
        self.tolerance: Tolerance = DOUBLE if is_double else SINGLE
        bits = ", ".join([runs.precision, *sorted(seen - {"float64"} if is_double else seen)])
        settings = f"{runs.num_steps} steps of {self.facts['module']} on {runs.accelerator}, {bits}"
        self.proof = Proof(" ".join(runs.words), settings)

    def start(self, name: str, how: Strategy, *words: str, **recorder: Any) -> Ended:
        """Run, and say so."""
        self.tell(name)
        ended = self.runs.start(name, how, *words, **recorder)
        if not ended.status:
            _ = ended.records  # a run that goes on writes over them
        return ended

    @cached_property
    def control(self) -> dict[str, float]:
        """How far rounding alone takes a run: weights that are moved by it, and the rest alike."""
        moved = self.start("control", ALONE, dropout=False, nudge=ROUNDING)
        return {} if moved.status else distances(self.reference.records, moved.records)

    @cached_property
    def frozen(self) -> Ended:
        """The reference with BatchNorm that does not learn."""
        return self.start("BatchNorm frozen", ALONE, dropout=False, batch_norm=False)

    def compared(self, reference: Ended, other: Ended, by_bit: bool = False) -> list[Departure]:
        """Where another run departs, beyond rounding."""
        found = departures(reference.records, other.records, self.tolerance, by_bit)
        if found and not by_bit and self.tolerance is SINGLE:
            self.tolerance = replace(SINGLE, allowed=self.control)
            found = departures(reference.records, other.records, self.tolerance)
        return [departure for departure in found if departure.kind != "hidden"]

    def under(self, how: Strategy) -> Verdict:
        """The same weights and metrics as in one process."""
        ended = self.ended[how.name] = self.start(how.name, how, dropout=False)
        if failed := failed_verdict(how.name, ended):
            return failed
        found = self.departed[how.name] = self.compared(self.reference, ended)
        if not found:
            far = distances(self.reference.records, ended.records)
            return Verdict(
                how.name, HOLDS, f"largest difference {max(far.values(), default=0.0):.1e}"
            )
        said, also = "; ".join(map(str, found)), ""
        norms = self.facts["batch_norm"]
        if norms and not (self.runs.has_sync_batchnorm and how.kind != "dp"):
            other = self.start(
                f"{how.name} with BatchNorm frozen", how, dropout=False, batch_norm=False
            )
            left = [] if other.status or self.frozen.status else self.compared(self.frozen, other)
            if not left and not other.status:
                line = "" if how.kind == "dp" else "trainer.sync_batchnorm=true"
                why = f"BatchNorm ({few(norms, 3)}) sees a share of the batch; frozen, all is equal"
                return Verdict(how.name, DEFINITION, said, why, line)
            found, also = left or found, "BatchNorm is not the whole reason; "
        reason = reasons.of_departure(found, how, self.facts, ended.told)
        return Verdict(how.name, reason.status, said, also + reason.why, reason.line)

    def evaluation(self) -> Verdict:
        """Each sample of an evaluation counts once."""
        whole, checked = self.reference.records, []
        mine = _evaluated(whole)
        if not mine:
            return Verdict("evaluation", SKIPPED, "the module has no evaluation")
        for name, ended in self.ended.items():
            if ended.status or self.facts.get("stream"):
                continue
            checked.append(name)
            for key, batches in _evaluated(ended.records).items():
                twice = sum((batches - mine.get(key, batches)).values())
                never = sum((mine.get(key, batches) - batches).values())
                if twice or never:
                    said = f"{key[0]} under {name}: {twice} batches too many, {never} never"
                    why = "likely: the loader gives other samples to each process by itself"
                    return Verdict("evaluation", BROKEN, said, why)
        if not checked:
            return Verdict("evaluation", SKIPPED, "no strategy ran that it could be compared with")
        ran = f" under {', '.join(checked)}"
        counts = [
            sum(b[2] or 0 for b in ranks[0]["batches"]) for ranks in whole.evaluated().values()
        ]
        return Verdict("evaluation", HOLDS, f"each of {max(counts)} samples once{ran}")

    def killed(self) -> Verdict:
        """Killed and resumed: equal by bit."""
        whole = self.reference
        if self.facts["dropout"]:
            whole = self.start("one process with dropout", ALONE)
        steps = [*whole.records.steps()] if not whole.status else []
        if len(steps) < 3:
            return Verdict("resume", SKIPPED, f"{len(steps)} steps are too few")
        off = {} if self.facts["dropout"] else {"dropout": False}
        killed = self.start("killed", ALONE, kill_after=steps[-2], **off)
        if killed.status != -9:
            return failed_verdict("resume", killed) or Verdict(
                "resume", SKIPPED, "it was not killed"
            )
        self.tell("resumed")
        resumed = self.runs.resume(killed, ALONE)
        if failed := failed_verdict("resume", resumed):
            return failed
        found = self.compared(whole, resumed, by_bit=True)
        found += other_states(whole.run_dir, resumed.run_dir) if not found else []
        at = f"killed after step {steps[-2]}, resumed after step {steps[-3]}"
        if not found:
            return Verdict("resume", HOLDS, f"equal by bit; {at}")
        lost = forgotten(whole.records, resumed.records)
        reason = reasons.of_resume(found, lost)
        return Verdict(
            "resume", BROKEN, f"{'; '.join(map(str, found))}; {at}", reason.why, reason.line
        )

    def elsewhere(self, how: Strategy | None) -> Verdict:
        """Resumed on another number of processes: equal up to rounding. Its folder is used up."""
        name = "resume elsewhere"
        if how is None:
            return Verdict(name, SKIPPED, "no strategy of several processes was asked for")
        if self.ended[how.name].status or self.departed[how.name]:
            return Verdict(name, SKIPPED, f"{how.name} does not train what one process does")
        folder = self.reference.run_dir
        paths = lookup.by_step(folder / "checkpoints")
        if len(paths) < 3:
            return Verdict(name, SKIPPED, "too few checkpoints")
        for path in paths[-2:]:
            path.unlink()
        lookup.link_newest(paths[-3])
        (folder / "results.json").unlink(missing_ok=True)
        self.tell(f"resumed under {how.name}")
        resumed = self.runs.resume(self.reference, how)
        if failed := failed_verdict(name, resumed):
            return failed
        if found := self.compared(self.reference, resumed):
            said = f"{how.name}: {'; '.join(map(str, found))}"
            lost = forgotten(self.reference.records, resumed.records)
            reason = reasons.of_resume(found, lost)
            return Verdict(name, BROKEN, said, reason.why, reason.line)
        far = max(distances(self.reference.records, resumed.records).values(), default=0.0)
        return Verdict(name, HOLDS, f"under {how.name}, largest difference {far:.1e}")

    def notes(self) -> list[str]:
        """What stands between strategies by nature, and what was done about it."""
        found = []
        if dropout := self.facts["dropout"]:
            names = few(dropout, 3)
            found.append(f"dropout ({names}): off in the comparisons, on where a run is killed")
        if norms := self.facts["batch_norm"]:
            found.append(f"BatchNorm ({few(norms, 3)})")
        if self.facts.get("draws"):
            found.append("the step draws random numbers")
        return found


def _evaluated(records: Records) -> dict[tuple[str, int], Counter[Any]]:
    """The batches of each evaluation, of all processes."""
    return {
        key: Counter(batch[:2] for rank in ranks for batch in rank["batches"])
        for key, ranks in records.evaluated().items()
    }
