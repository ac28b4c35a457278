"""Every way to run an experiment, compared with one process.

In: what starts short runs (`runs.py`). Out: a verdict on each, with the largest differences of
parameters, buffers and logged values, which `__main__.py` prints. `ShortRun` is a callback of them.
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
from harness.errors import UserError
from harness.exact.seeded_steps import DROPOUTS
from harness.loggers import metrics_table
from harness.names import few
from harness.prove.runs import ALONE, Ended, Runs

log = logging.getLogger(__name__)
STRATEGIES = ("dp(2)", "ddp(2)", "ddp(3)", "ddp2(2x2)")
REFERENCE, EQUAL, WARNED, REFUSED = "reference", "equal", "warned", "refused"
DIFFERS, FAILS = "DIFFERS", "FAILS"  # by more than the run has warned of; exit status 1
# Attributes of attention, recurrent and residual layers.
PROBABILITIES = ("dropout", "dropout_p", "attn_dropout", "attention_dropout", "drop_prob")
# Distances that rounding makes: of weights, and of logged values, which may be of 32 bits.
DOUBLE, SINGLE, BY_BIT = (1e-9, 2e-6), (2e-6, 2e-5), (0.0, 0.0)
# In run.log, of the rooms that keep a run the same under every strategy, and of this one.
ROOMS = "checkpoints|data|exact|prove|strategies|upstream"
WARNING = re.compile(
    rf"^\d\S+ \S+ WARNING harness\.(?:{ROOMS})\b\S*: (.*?)(?=^\d{{4}}-|\Z)", re.M | re.S
)
ELSEWHERE = re.compile("^epoch$|^step$|^gpu/")  # columns that are no results
ANOTHER = " does not train alike "  # says the parity check where a loss is no mean


def switched_off(module: nn.Module) -> list[str]:
    """Set the probabilities of dropout in a module to 0, and return their names."""
    found = []
    for path, part in module.named_modules():
        for name in ("p",) if isinstance(part, DROPOUTS) else PROBABILITIES:
            value = getattr(part, name, None)
            if isinstance(value, float) and 0 < value <= 1:
                found.append(f"{path or type(part).__name__}.{name}={value:g}")
                setattr(part, name, 0.0)
    return found


class ShortRun(pl.Callback):
    """Switch dropout off, for two processes draw other masks; die after an optimizer step."""

    def __init__(self, kill_after: float = math.inf) -> None:
        self.kill_after = kill_after

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare the module."""
        if names := switched_off(pl_module):
            log.warning("Dropout is off in these runs: %s.", few(names, 3))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        """Die as by ``kill -9``, unless this start goes on with a run that was killed."""
        if trainer.global_step >= self.kill_after and trainer.ckpt_path is None:
            os.kill(os.getpid(), signal.SIGKILL)


class Record:
    """What a run has come to: its last weights and buffers, all that it logged, its warnings."""

    def __init__(self, run_dir: Path) -> None:
        last = lookup.by_step(run_dir / "checkpoints")[-1]
        self.weights = read_weights(last)
        self.warnings = [x.strip() for x in WARNING.findall((run_dir / "run.log").read_text())]
        rows: dict[str, list[list[float]]] = {}
        for row in metrics_table.read(run_dir / "metrics.csv")[1]:
            for name in [name for name in row if row[name] and not ELSEWHERE.search(name)]:
                rows.setdefault(name, []).append([float(row["step"]), float(row[name])])
        self.values = {name: torch.tensor(pairs) for name, pairs in rows.items()}  # (rows, 2)


def differences(
    one: Record, two: Record, tolerance: tuple[float, float]
) -> list[tuple[bool, float, str]]:
    """Return whether and how far each weight and logged value differs, the farthest first."""
    found = []
    pairs = ((one.weights, two.weights), (one.values, two.values))
    for (mine, its), allowed in zip(pairs, tolerance, strict=True):
        for name in {**mine, **its}:
            far = distance(mine.get(name), its.get(name))
            found.append((far > allowed, far, name))
    return sorted(found, reverse=True)


def distance(one: Tensor | None, two: Tensor | None) -> float:
    """Return the largest difference of two tensors' numbers, as a share of those above 1."""
    if one is None or two is None or one.shape != two.shape:
        return math.inf
    a, b = one.to(torch.complex128), two.to(torch.complex128)
    far = ((a - b).abs() / a.abs().clamp(min=1)).nan_to_num(math.inf, math.inf)
    far = far.where((a != b) & ~(a.isnan() & b.isnan()), 0.0)
    return float(far.max()) if far.numel() else 0.0


class Verdict(NamedTuple):
    """A word on one way to run the experiment, and the reason."""

    name: str
    verdict: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name:20} {self.verdict:9} " + self.reason.replace("\n", f"\n{'':31}")


def prove(runs: Runs, strategies: Sequence[str] = STRATEGIES) -> Iterator[Verdict]:
    """Train an experiment for a few steps in many ways, and compare each with one process.

    Raises:
        UserError: one process does not train.
    """
    tolerance, began = DOUBLE if runs.precision == "64-true" else SINGLE, time.monotonic()
    alone = runs.start(ALONE)
    if alone.status:
        raise UserError(alone.message)
    runs.timeout = 60 + 10 * (time.monotonic() - began)
    reference = Record(alone.run_dir)
    yield Verdict(ALONE, REFERENCE, "\n".join(reference.warnings))
    for name in strategies:
        yield judge(name, runs.start(name), reference, tolerance)
    killed = runs.start(ALONE, f"+callbacks.prove.kill_after={runs.num_steps - 1}", name="killed")
    several = [name for name in strategies if not name.startswith("dp(")][:1]
    for name in [ALONE, *several]:
        allowed = BY_BIT if name == ALONE else tolerance
        yield judge(f"resume, {name}", runs.resume(killed, name), reference, allowed)


def judge(name: str, ended: Ended, one: Record, tolerance: tuple[float, float]) -> Verdict:
    """Compare a run with that of one process, if it has ended well."""
    if ended.status:
        return Verdict(name, FAILS if ended.has_crashed else REFUSED, ended.message)
    record = Record(ended.run_dir)
    found = differences(one, record, tolerance)
    texts = [f"{name} by {far:.1e}" for _, far, name in found]
    if not (num := sum(differs for differs, *_ in found)):
        return Verdict(name, EQUAL, f"at most {texts[0]}" if found[0][1] else "by bit")
    news = [text for text in record.warnings if text not in one.warnings]
    is_warned = news and not any(ANOTHER in text for text in news)
    reason = "\n".join([few(texts[:num], 8), *news])
    return Verdict(name, WARNED if is_warned else DIFFERS, reason)
