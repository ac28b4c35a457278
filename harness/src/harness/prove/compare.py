"""Every way to run an experiment, compared with one process.

In: what starts short runs (`runs.py`). Out: a verdict on each, with the difference of each
parameter, buffer and logged value, which `__main__.py` prints. `ShortRun` is a callback of them.
"""

import csv
import json
import logging
import math
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from harness.checkpoints import lookup
from harness.errors import UserError
from harness.exact.first_batch import FirstBatchCheck
from harness.exact.seeded_steps import dropouts
from harness.names import few
from harness.prove.runs import ALONE, HANGS, Ended, Runs, strategy

log = logging.getLogger(__name__)
EQUAL, TOLD, REFUSED, SKIPPED = "equal", "told", "refused", "not tried"
DIFFERS, FAILS = "DIFFERS", "FAILS"
STRATEGIES = ("dp(2)", "ddp(2)", "ddp(3)", "ddp2(2x2)")
FIRST, RESUME, ELSEWHERE = "first batch", "resume", "resume elsewhere"
FINDINGS = "first_batch.json"  # of the first-batch check, in the folder of one process
NUDGE = 1e-7  # a rounding of single precision
FAR = 30.0  # times as far as the control is no rounding any more
# In run.log, of the rooms that keep a run the same under every strategy, and of this one.
ROOMS = "checkpoints|data|exact|prove|strategies|upstream"
WARNING = re.compile(
    rf"^\d\S+ \S+ WARNING harness\.(?:{ROOMS})\b\S*: (.*?)(?=^\d{{4}}-|\Z)", re.M | re.S
)


class Tolerance(NamedTuple):
    """The distances that rounding may make."""

    of_weights: float
    of_values: float  # that are logged; torchmetrics counts in single precision


DOUBLE, SINGLE, BY_BIT = Tolerance(1e-9, 2e-6), Tolerance(2e-6, 2e-5), Tolerance(0, 0)


class ShortRun(pl.Callback):
    """Switch dropout off, for two processes draw other masks.

    Args:
        run_dir: of the run.
        nudge: share by which each initial parameter is moved, as rounding would.
        kill_after: the optimizer step after which the run kills itself.
        check: compute what several processes would make of the first batches.
    """

    def __init__(
        self, run_dir: str, nudge: float = 0.0, kill_after: int | None = None, check: bool = False
    ) -> None:
        self.run_dir, self.nudge = Path(run_dir), nudge
        self.kill_after, self.check = kill_after, check

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare the module."""
        if names := list(dropouts(pl_module, switch_off=True)):
            log.warning("Dropout is off in these runs: %s.", few(names, 3))
        with torch.no_grad():
            for parameter in pl_module.parameters() if self.nudge else ():
                parameter.mul_(1 + self.nudge)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set untyped
        (self.first_batch,) = [one for one in callbacks if isinstance(one, FirstBatchCheck)]
        self.first_batch.is_wanted = self.check

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        """Die as by ``kill -9``, unless this start goes on with a run that was killed."""
        if self.check:
            (self.run_dir / FINDINGS).write_text(json.dumps(self.first_batch.findings))
        is_due = self.kill_after is not None and trainer.global_step >= self.kill_after
        if is_due and trainer.ckpt_path is None:
            os.kill(os.getpid(), signal.SIGKILL)


class Record:
    """What a run has come to: its last weights and buffers, all that it logged, its warnings."""

    def __init__(self, run_dir: Path) -> None:
        last = lookup.by_step(run_dir / "checkpoints")[-1]
        self.weights: dict[str, Tensor] = torch.load(last, "cpu", weights_only=True)["state_dict"]
        findings = run_dir / FINDINGS
        self.findings = json.loads(findings.read_text()) if findings.is_file() else {}
        said = (run_dir / "run.log").read_text()
        self.warnings = [text.strip() for text in WARNING.findall(said)]
        rows: dict[str, list[list[float]]] = {}
        with (run_dir / "metrics.csv").open() as file:
            for row in csv.DictReader(file):
                for name in [name for name in row if row[name] and name not in ("epoch", "step")]:
                    rows.setdefault(name, []).append([float(row["step"]), float(row[name])])
        self.values = {name: torch.tensor(pairs) for name, pairs in rows.items()}  # (rows, 2)


class Difference(NamedTuple):
    """How far a parameter, buffer or logged value is from that of one process."""

    is_equal: bool  # or else rounding does not explain it
    distance: float  # as a share, see ``distance``


def differences(
    reference: Record, other: Record, tolerance: Tolerance, control: dict[str, Difference]
) -> dict[str, Difference]:
    """The difference of each name; ``control`` has those of a run that was moved by rounding."""
    found = {}
    for mine, its, allowed, least in (
        (reference.weights, other.weights, tolerance.of_weights, 1.0),
        (reference.values, other.values, tolerance.of_values, 1e-3),
    ):
        for name in [*mine, *(name for name in its if name not in mine)]:
            both = name in mine and name in its
            far = distance(mine[name], its[name], least) if both else math.inf
            rounding = FAR * control[name].distance if name in control else 0.0
            found[name] = Difference(far <= max(allowed, rounding), far)
    return found


def distance(one: Tensor, two: Tensor, least: float = 1.0) -> float:
    """The largest difference of two tensors' numbers, as a share of the first's.

    A number below ``least`` counts as that; a tensor of another shape is infinitely far.
    """
    if one.shape != two.shape:
        return math.inf
    kind = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(kind), two.to(kind)
    far = ((a - b).abs() / a.abs().clamp(min=least)).nan_to_num(math.inf, math.inf)
    far = far.where((a != b) & ~(a.isnan() & b.isnan()), 0.0)
    return float(far.max()) if far.numel() else 0.0


@dataclass(frozen=True)
class Verdict:
    """Of one way to run the experiment: one of the six words, why, and by how much each name."""

    name: str
    verdict: str
    said: str
    differences: dict[str, Difference] = field(default_factory=dict)

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
    several = [how for how in chosen if not how.name.startswith("dp(")]
    judge = Judge(runs, tell, has_several=bool(several))
    found = {FIRST: judge.first_batch()}
    for how in chosen:
        tell(how.name)
        found[how.name] = judge.verdict(how.name, runs.start(how.name, how))
    tell("a run that is killed, and resumed")
    killed = runs.start("killed", ALONE, kill_after=runs.num_steps - 1)
    found[RESUME] = judge.verdict(RESUME, runs.resume(RESUME, killed, ALONE), by_bit=True)
    equal = [how for how in several if found[how.name].verdict == EQUAL]
    if equal:
        tell(f"and resumed under {equal[0].name}")
        found[ELSEWHERE] = judge.verdict(ELSEWHERE, runs.resume(ELSEWHERE, killed, equal[0]))
    else:
        said = "of the strategies that were tried none has several processes and is equal"
        found[ELSEWHERE] = Verdict(ELSEWHERE, SKIPPED, said)
    seconds = time.monotonic() - began
    settings = f"{runs.num_steps} steps, {runs.accelerator}, {runs.precision}, {seconds:.0f} s"
    return Proof(runs.typed, settings, [*found.values()], judge.reference.warnings)


class Judge:
    """Runs one process, and compares what has ended with it.

    Args:
        runs: of the experiment.
        tell: is told what is being run.
        has_several: whether what several processes make of the first batches is computed as well.
    """

    def __init__(self, runs: Runs, tell: Callable[[str], None], has_several: bool) -> None:
        self.runs, self.tell, self.has_several = runs, tell, has_several
        tell("one process")
        began = time.monotonic()
        ended = runs.start("one process", ALONE, check=has_several)
        if ended.status and runs.may_round:
            tell("one process in single precision")
            runs.precision = "32-true"
            ended = runs.start("one process in single precision", ALONE, check=has_several)
        if ended.status:
            raise UserError(ended.sentence)
        runs.timeout = 60 + 10 * (time.monotonic() - began)
        self.reference = Record(ended.run_dir)

    def first_batch(self) -> Verdict:
        """Of the first-batch check."""
        if not self.has_several:
            return Verdict(FIRST, SKIPPED, "every step of dp sees whole batches")
        findings = self.reference.findings
        verdict = DIFFERS if "different" in findings else TOLD if findings else EQUAL
        return Verdict(FIRST, verdict, "\n".join(findings.values()) or "whole and in parts")

    @cached_property
    def control(self) -> dict[str, Difference]:
        """How far a rounding of single precision takes the run, for what computes in that."""
        self.tell("one process whose initial parameters are moved by rounding")
        ended = self.runs.start("control", ALONE, nudge=NUDGE)
        if ended.status:
            return {}
        moved = Record(ended.run_dir)
        moved.weights = {name: tensor / (1 + NUDGE) for name, tensor in moved.weights.items()}
        return differences(self.reference, moved, DOUBLE, {})

    def verdict(self, name: str, ended: Ended, by_bit: bool = False) -> Verdict:
        """Of a run that has ended."""
        if ended.status == HANGS:
            return Verdict(name, FAILS, f"did not end within {self.runs.timeout:.0f} s")
        if ended.status:
            return Verdict(name, REFUSED if ended.is_refused else FAILS, ended.sentence)
        record = Record(ended.run_dir)
        tolerance = BY_BIT if by_bit else DOUBLE if self.runs.precision == "64-true" else SINGLE
        found = differences(self.reference, record, tolerance, {})
        if not by_bit and not all(one.is_equal for one in found.values()):
            found = differences(self.reference, record, tolerance, self.control)
        worst = max(found, key=lambda key: (not found[key].is_equal, found[key].distance))
        said = f"{worst} by {found[worst].distance:.1e}"
        if found[worst].is_equal:
            said = f"at most {said}" if found[worst].distance else "by bit"
            return Verdict(name, EQUAL, said, found)
        news = [text for text in record.warnings if text not in self.reference.warnings]
        is_explained = {"different", "random"} & self.reference.findings.keys() and not by_bit
        verdict = TOLD if news or is_explained else DIFFERS
        return Verdict(name, verdict, "\n".join([said, *news]), found)
