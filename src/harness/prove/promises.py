"""The promises, one after the other, each held against short runs of the owner's experiment."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from harness.checkpoints import lookup
from harness.checkpoints.reading import read
from harness.checkpoints.stand_in import StandIn
from harness.convert.conversion import convert
from harness.convert.tensors import CheckpointError
from harness.errors import UserError
from harness.prove import reasons
from harness.prove.reasons import BROKEN, DEFINITION, HOLDS, REFUSED, SKIPPED, Reason
from harness.prove.records import (
    DOUBLE,
    SINGLE,
    Departure,
    Records,
    Tolerance,
    departures,
    distances,
)
from harness.prove.runs import ALONE, Ended, Runs, Strategy, strategy

STRATEGIES = ("dp(2)", "ddp(2)", "ddp(3)", "ddp2(2x2)")
OTHERS = ("resume", "resume elsewhere", "weights_only", "convert", "evaluation")
ROUNDING = 1e-7  # by which the weights of a control are moved
PROBE = "harness.prove.probing.Probe"


@dataclass(frozen=True)
class Verdict:
    """Whether one promise holds, and what there is to say."""

    promise: str
    status: str
    said: str
    why: str = ""
    line: str = ""  # to write instead

    def __str__(self) -> str:
        lines = [f"{self.promise}: {self.status}: {self.said}", self.why]
        return "\n".join([*filter(None, lines), *[f"change: {self.line}"] * bool(self.line)])


@dataclass
class Proof:
    """What holds for an experiment."""

    experiment: str
    settings: str
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_broken(self) -> bool:
        """Whether a promise is broken."""
        return any(verdict.status == BROKEN for verdict in self.verdicts)

    def verdict(self, promise: str) -> Verdict:
        """Of one promise."""
        found = [verdict for verdict in self.verdicts if verdict.promise == promise]
        return found[0] if found else Verdict(promise, SKIPPED, "not asked for")


def prove(
    words: Sequence[str],
    folder: Path,
    *,
    num_steps: int = 6,
    strategies: Sequence[str] = STRATEGIES,
    precision: str = "auto",
    timeout: float = 600.0,
    conf: str = "conf",
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
        conf: the folder of the config files.
        tell: is told what is being done.

    Raises:
        UserError: if the experiment does not train in one process.
    """
    if num_steps < 3:
        raise UserError(f"--steps {num_steps}: use 3 or more, to be killed and to go on.")
    began, chosen = time.monotonic(), [strategy(name) for name in strategies]
    runs = Runs(words, folder, num_steps, timeout, conf)
    proving = Proving(runs, tell, precision)
    proof = proving.proof
    for how in chosen:
        proof.verdicts.append(proving.under(how))
    proof.verdicts += [proving.evaluation(), proving.killed(), *proving.checkpoint()]
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
        self.reference = self.start("one process", ALONE, dropout=False)
        if self.reference.status and precision == "auto":
            runs.precision = "32-true"
            self.reference = self.start("one process in 32 bits", ALONE, dropout=False)
        if self.reference.status:
            raise UserError(self.reference.sentence)
        self.facts = self.reference.records.facts
        seen = {*self.facts.get("dtypes", ())}
        is_double = runs.precision == "64-true" and seen <= {"float64"}
        self.tolerance: Tolerance = DOUBLE if is_double else SINGLE
        bits = runs.precision + ("" if is_double or seen <= {"float32"} else f" with {', '.join(sorted(seen))}")
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

    @cached_property
    def probe(self) -> dict[str, Any]:
        """What a look into the training step finds."""
        path = self.runs.folder / "probe.json"
        words = [f"+callbacks.probe._target_={PROBE}", f'+callbacks.probe.path="{path}"']
        if self.plain:
            for key, value in self.plain.items():
                words.append(f'+callbacks.probe.{key}="{value}"')
        self.start("look into the step", ALONE, *words, dropout=False)
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def compared(self, reference: Ended, other: Ended, by_bit: bool = False) -> list[Departure]:
        """Where another run departs, beyond rounding."""
        found = departures(reference.records, other.records, self.tolerance, by_bit)
        if found and not by_bit and self.tolerance is SINGLE:
            self.tolerance = Tolerance(
                SINGLE.of_values, SINGLE.of_movement, SINGLE.of_metrics, self.control
            )
            found = departures(reference.records, other.records, self.tolerance)
        return [departure for departure in found if departure.kind != "hidden"]

    def under(self, how: Strategy) -> Verdict:
        """The same weights and metrics as in one process."""
        ended = self.ended[how.name] = self.start(how.name, how, dropout=False)
        if failed := _failed(how.name, ended):
            return failed
        found = self.departed[how.name] = self.compared(self.reference, ended)
        if not found:
            far = distances(self.reference.records, ended.records)
            return Verdict(how.name, HOLDS, f"largest difference {max(far.values(), default=0.0):.1e}")
        said, also = "; ".join(map(str, found)), ""
        norms = self.facts["batch_norm"]
        if norms and not (self.runs.has_sync_batchnorm and how.kind != "dp"):
            other = self.start(f"{how.name} with BatchNorm frozen", how, dropout=False, batch_norm=False)
            left = [] if other.status or self.frozen.status else self.compared(self.frozen, other)
            if not left and not other.status:
                line = "" if how.kind == "dp" else "trainer.sync_batchnorm=true"
                why = f"BatchNorm ({_some(norms)}) sees a share of the batch; frozen, all is equal"
                return Verdict(how.name, DEFINITION, said, why, line)
            found, also = left or found, "BatchNorm is not the whole reason; "
        reason = reasons.of_departure(found, how, self.facts, self.probe)
        return Verdict(how.name, reason.status, said, also + reason.why, reason.line)

    def evaluation(self) -> Verdict:
        """Each sample of an evaluation counts once."""
        mine, checked, num = _evaluated(self.reference.records), [], 0
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
                    said = f"{key[0]} at step {key[1]} under {name}: {twice} batches too many, {never} never"
                    why = "likely: the loader gives other samples to each process by itself"
                    return Verdict("evaluation", BROKEN, said, why)
        num = sum(next(iter(mine.values())).values())
        ran = f" under {', '.join(checked)}" if checked else ""
        return Verdict("evaluation", HOLDS, f"each of {num} batches once{ran}")

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
            return _failed("resume", killed) or Verdict("resume", SKIPPED, "it was not killed")
        self.tell("resumed")
        resumed = self.runs.resume(killed, ALONE)
        if failed := _failed("resume", resumed):
            return failed
        found = self.compared(whole, resumed, by_bit=True)
        found += _other_states(whole.run_dir, resumed.run_dir) if not found else []
        at = f"killed after step {steps[-2]}, resumed after step {steps[-3]}"
        if not found:
            return Verdict("resume", HOLDS, f"equal by bit; {at}")
        forgotten = _forgotten(whole.records, resumed.records)
        reason = reasons.of_resume(found, forgotten, self.probe.get("generators", []))
        return Verdict("resume", BROKEN, f"{'; '.join(map(str, found))}; {at}", reason.why, reason.line)

    def elsewhere(self, how: Strategy | None) -> Verdict:
        """Resumed on another number of processes: equal up to rounding; the reference is used up."""
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
        if failed := _failed(name, resumed):
            return failed
        if found := self.compared(self.reference, resumed):
            said = f"{how.name}: {'; '.join(map(str, found))}"
            forgotten = _forgotten(self.reference.records, resumed.records)
            reason = reasons.of_resume(found, forgotten, self.probe.get("generators", []))
            return Verdict(name, BROKEN, said, reason.why, reason.line)
        far = max(distances(self.reference.records, resumed.records).values(), default=0.0)
        return Verdict(name, HOLDS, f"under {how.name}, largest difference {far:.1e}")

    @cached_property
    def best(self) -> Path | None:
        """The checkpoint that is looked at."""
        folder = self.reference.run_dir / "checkpoints"
        return next((folder / n for n in ("best.ckpt", "last.ckpt") if (folder / n).is_file()), None)

    @cached_property
    def plain(self) -> dict[str, str]:
        """The plain file that is made of it; empty where that fails."""
        try:
            return self._convert()
        except (UserError, CheckpointError, OSError):
            return {}

    def _convert(self) -> dict[str, str]:
        output = self.runs.folder / "weights.pt"
        report = convert(self.best or "", output, packages=self.runs.packages, force=True)
        new, entry = next(iter(report.tensors.items()))
        prefix = entry.source.removesuffix(new)
        return {"checkpoint": str(self.best), "plain": str(output), "prefix": prefix}

    def checkpoint(self) -> list[Verdict]:
        """It loads with ``weights_only=True``, converts, and the plain file gives the same."""
        if self.best is None:
            return [Verdict(p, SKIPPED, "there is no checkpoint") for p in ("weights_only", "convert")]
        return [self._loads(self.best), self._converts()]

    def _loads(self, path: Path) -> Verdict:
        try:
            torch.load(path, weights_only=True)
        except Exception as error:  # whatever torch makes of what it refuses
            odd = [where for where in _odd(read(path)) if where]
            said = str(error).partition("\n")[0][:200]
            why = f"likely: {_some(odd)} is neither a number, a text nor a tensor" if odd else said
            key = odd[0].partition(" ")[0] if odd else "checkpoint[...]"
            line = f"{key} = float(...)  # or torch.as_tensor(...), in on_save_checkpoint"
            return Verdict("weights_only", BROKEN, f"torch.load refuses {path.name}", why, line)
        return Verdict("weights_only", HOLDS, f"torch.load({path.name}, weights_only=True)")

    def _converts(self) -> Verdict:
        try:
            found = self._convert()
        except (UserError, CheckpointError, OSError) as error:
            return Verdict("convert", BROKEN, str(error))
        self.plain = found
        answer = self.probe.get("plain", {})
        network = answer.get("network", found["prefix"] or "the whole module")
        if "error" in answer or not answer:
            return Verdict("convert", HOLDS, f"{network}; its outputs were not compared")
        if not answer["equal"]:
            return Verdict("convert", BROKEN, f"{network} gives other outputs with the plain file")
        outputs = "and outputs " if answer["num_calls"] else ""
        return Verdict("convert", HOLDS, f"weights {outputs}of {network} equal by bit")

    def notes(self) -> list[str]:
        """What stands between strategies by nature, and what was done about it."""
        step, found = self.probe.get("step", {}), []
        if dropout := self.facts["dropout"]:
            found.append(
                f"dropout ({_some(dropout)}): off in the comparisons, each process draws other "
                "masks; on where the run was killed"
            )
        if norms := self.facts["batch_norm"]:
            found.append(f"BatchNorm ({_some(norms)})")
        if draws := step.get("draws"):
            found.append(f"the step draws random numbers: {_some(list(draws))}")
        if written := step.get("written"):
            found.append(f"the step writes {_some(written)}")
        if coincide := step.get("coincide"):
            found.append(f"inputs with as many rows as samples: {_some(coincide)}")
        own = [
            name
            for name, entry in self.facts["logged"].items()
            if entry["stages"] == ["training"]
            and entry["kind"] in ("Tensor", "float", "int")
            and not entry["how"].get("sync_dist")
        ]
        if own and any(ended.strategy.num_processes > 1 for ended in self.ended.values()):
            found.append(f"logged of each process's own share, without sync_dist=True: {_some(own)}")
        return found


def _failed(promise: str, ended: Ended) -> Verdict | None:
    if ended.status == 0:
        return None
    if ended.status == 124:
        return Verdict(promise, BROKEN, "the run hangs")
    status = REFUSED if ended.is_refused else BROKEN
    said = ended.sentence if ended.is_refused else f"the run ends with {ended.sentence}"
    return Verdict(promise, status, said)


def _evaluated(records: Records) -> dict[tuple[str, int], Counter[Any]]:
    """The batches of each evaluation, of all processes."""
    return {
        key: Counter(batch[:2] for rank in ranks for batch in rank["batches"])
        for key, ranks in records.evaluated().items()
    }


def _forgotten(whole: Records, resumed: Records) -> list[str]:
    """What had changed before a kill, and was not brought back."""
    starts = resumed.steps("start")
    step = max(starts)
    if step not in whole.steps():
        return []
    before, then, now = whole.initial, whole.steps()[step]["state"], starts[step]["state"]
    return [
        name
        for name, kept in then.items()
        if kept.kind == "hidden"
        and (name not in before or before[name].checksum != kept.checksum)
        and (name not in now or now[name].checksum != kept.checksum)
    ]


def _other_states(one: Path, two: Path) -> list[Departure]:
    """What differs in the last checkpoints besides weights."""
    a, b = (read(folder / "checkpoints" / lookup.NEWEST) for folder in (one, two))
    return [
        Departure("state of", key, a["global_step"], float("nan"))
        for key in ("optimizer_states", "lr_schedulers")
        if not _is_same(a.get(key), b.get(key))
    ]


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b or (a != a and b != b) or isinstance(a, StandIn))


PLAIN = (int, float, str, bytes, bool, complex, type(None), torch.Tensor, torch.dtype, torch.Size)


def _odd(tree: Any, path: str = "checkpoint") -> list[str]:
    """Where a checkpoint holds what is not plain."""
    if isinstance(tree, dict):
        return [x for key, value in tree.items() for x in _odd(value, f"{path}[{key!r}]")]
    if isinstance(tree, (list, tuple, set)):
        return [x for i, value in enumerate(tree) for x in _odd(value, f"{path}[{i}]")]
    return [] if type(tree) in PLAIN else [f"{path} ({type(tree).__name__})"]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


__all__ = ["OTHERS", "STRATEGIES", "Proof", "Reason", "Verdict", "prove"]
