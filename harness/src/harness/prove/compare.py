"""Run an experiment in many ways, and compare each run with a run in one process.

In: ``ExperimentRuns``, which starts short runs. Out: a ``Comparison`` for each, with the largest
differences of parameters, buffers and logged values; `__main__.py` prints it. Each run has the
callback ``ShortRun``.
"""

import logging
import math
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from harness.checkpoints import lookup
from harness.checkpoints.reading import read_weights
from harness.display import join_first
from harness.errors import UserError
from harness.loggers import metrics_table
from harness.parity.seeded_steps import DROPOUTS
from harness.prove.short_runs import ALONE, EndedRun, ExperimentRuns

log = logging.getLogger(__name__)
STRATEGIES = ("dp(2)", "ddp(2)", "ddp(3)", "ddp2(2x2)")
REFERENCE, EQUAL, WARNED, REFUSED = "reference", "equal", "warned", "refused"
DIFFERS, FAILS = "DIFFERS", "FAILS"  # verdicts without an explanation: exit status 1
# Names of dropout probabilities in attention, recurrent and residual layers.
PROBABILITIES = ("dropout", "dropout_p", "attn_dropout", "attention_dropout", "drop_prob")
# Tolerances for rounding: of weights, and of logged values, which may have 32 bits.
DOUBLE, SINGLE, BITWISE = (1e-9, 2e-6), (2e-6, 2e-5), (0.0, 0.0)
# Packages that make training equal under every strategy; their warnings explain differences.
PACKAGES = "checkpoints|compat|data|parity|prove|strategies"
WARNING = re.compile(  # in run.log
    rf"^\d\S+ \S+ WARNING harness\.(?:{PACKAGES})\b\S*: (.*?)(?=^\d{{4}}-|\Z)", re.M | re.S
)
NO_RESULTS = re.compile("^epoch$|^step$|^gpu/")  # columns of metrics.csv that are not results
WITHOUT_DROPOUT = "All runs are without dropout"
NOT_ALIKE = " does not train alike "  # in the parity check's warning


def switch_dropout_off(module: nn.Module) -> list[str]:
    """Set the probabilities of dropout in a module to 0, and return their names and values."""
    changed = []
    for path, part in module.named_modules():
        for name in ("p",) if isinstance(part, DROPOUTS) else PROBABILITIES:
            value = getattr(part, name, None)
            if isinstance(value, float) and 0 < value <= 1:
                changed.append(f"{path or type(part).__name__}.{name}={value:g}")
                setattr(part, name, 0.0)
    return changed


class ShortRun(pl.Callback):
    """Switch dropout off, because ranks draw different masks, and kill the run if that is wanted.

    Args:
        kill_after: the number of optimizer steps after which the run is killed; by default, never.
    """

    def __init__(self, kill_after: float = math.inf) -> None:
        self.kill_after = kill_after

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Switch dropout off, and log a warning."""
        if names := switch_dropout_off(pl_module):
            log.warning("%s. Switched off: %s.", WITHOUT_DROPOUT, join_first(names, 3))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Kill this process as ``kill -9`` does, unless it resumes a run that was killed."""
        if trainer.global_step >= self.kill_after and trainer.ckpt_path is None:
            os.kill(os.getpid(), signal.SIGKILL)


class RunResult:
    """The result of a run: its last weights and buffers, its logged values, its warnings."""

    def __init__(self, run_dir: Path) -> None:
        last = lookup.by_step(run_dir / "checkpoints")[-1]
        self.weights = read_weights(last)
        self.warnings = [x.strip() for x in WARNING.findall((run_dir / "run.log").read_text())]
        rows: dict[str, list[list[float]]] = {}
        for row in metrics_table.read(run_dir / "metrics.csv")[1]:
            for name in [name for name in row if row[name] and not NO_RESULTS.search(name)]:
                rows.setdefault(name, []).append([float(row["step"]), float(row[name])])
        self.values = {name: torch.tensor(pairs) for name, pairs in rows.items()}  # (rows, 2)


def differences(
    reference: RunResult, other: RunResult, tolerance: tuple[float, float]
) -> list[tuple[bool, float, str]]:
    """Compare two runs' weights and logged values.

    Returns:
        For each weight and value whether it differs, its distance and its name, the largest
        distance first.
    """
    found = []
    pairs = ((reference.weights, other.weights), (reference.values, other.values))
    for (expected, actual), allowed in zip(pairs, tolerance, strict=True):
        for name in {**expected, **actual}:
            error = distance(expected.get(name), actual.get(name))
            found.append((error > allowed, error, name))
    return sorted(found, reverse=True)


def distance(expected: Tensor | None, actual: Tensor | None) -> float:
    """Return the largest difference between two tensors: relative where ``expected`` exceeds 1."""
    if expected is None or actual is None or expected.shape != actual.shape:
        return math.inf
    a, b = expected.to(torch.complex128), actual.to(torch.complex128)
    errors = ((a - b).abs() / a.abs().clamp(min=1)).nan_to_num(math.inf, math.inf)
    errors = errors.where((a != b) & ~(a.isnan() & b.isnan()), 0.0)
    return float(errors.max()) if errors.numel() else 0.0


class Comparison(NamedTuple):
    """How one way to run the experiment compares with one process."""

    name: str  # the strategy, such as "ddp(2)"
    verdict: str  # EQUAL, DIFFERS and so on
    reason: str  # the largest difference, or the message

    def __str__(self) -> str:
        return f"{self.name:20} {self.verdict:9} " + self.reason.replace("\n", f"\n{'':31}")


def prove(runs: ExperimentRuns, strategies: Sequence[str] = STRATEGIES) -> Iterator[Comparison]:
    """Train an experiment for a few steps in many ways, and compare each run with one process.

    The last comparisons are of a run that was killed and resumed.

    Raises:
        UserError: one process does not train.
    """
    tolerance, began = DOUBLE if runs.precision == "64-true" else SINGLE, time.monotonic()
    alone = runs.start(ALONE)
    if alone.status:
        raise UserError(alone.message)
    runs.timeout = 60 + 10 * (time.monotonic() - began)
    reference = RunResult(alone.run_dir)
    yield Comparison(ALONE, REFERENCE, "\n".join(reference.warnings))
    for name in strategies:
        yield compare(name, runs.start(name), reference, tolerance)
    killed = runs.start(ALONE, f"+callbacks.prove.kill_after={runs.num_steps - 1}", name="killed")
    several = [name for name in strategies if not name.startswith("dp(")][:1]
    for name in [ALONE, *several]:
        allowed = BITWISE if name == ALONE else tolerance
        yield compare(f"resume, {name}", runs.resume(killed, name), reference, allowed)


def compare(
    name: str, ended: EndedRun, reference: RunResult, tolerance: tuple[float, float]
) -> Comparison:
    """Compare a run with the reference. If the run failed, the reason is its error message."""
    if ended.status:
        return Comparison(name, FAILS if ended.has_crashed else REFUSED, ended.message)
    result = RunResult(ended.run_dir)
    found = differences(reference, result, tolerance)
    texts = [f"{name} by {error:.1e}" for _, error, name in found]
    if not (num := sum(differs for differs, *_ in found)):
        return Comparison(name, EQUAL, f"at most {texts[0]}" if found[0][1] else "bit-identical")
    # One process warns as well, for example of BatchNorm with accumulated batches.
    of_both = [text for text in result.warnings if not text.startswith(WITHOUT_DROPOUT)]
    warnings = [text for text in of_both if text not in reference.warnings] or of_both
    is_warned = warnings and not any(NOT_ALIKE in text for text in warnings)
    reason = "\n".join([join_first(texts[:num], 8), *warnings])
    return Comparison(name, WARNED if is_warned else DIFFERS, reason)
