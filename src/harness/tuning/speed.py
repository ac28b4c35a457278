"""Switches that make steps faster, tried beside the plain run, each in a process of its own."""

import math
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from harness import allowed
from harness.command import gpus
from harness.errors import UserError
from harness.strategies.launchable import num_processes
from harness.tuning.commands import composed
from harness.tuning.contender import Failed, First, Ready, Turn, train_by_turns

MOST_STEPS = 20  # in which a loss must follow that of the plain run
NUM_TURNS = 7  # of each; a switch without effect is the faster one in all of them once in 128 times
LEAST_TURNS = 3  # where steps are long
WORTH = 1.03  # a median gain below that is not worth a word
END_SECONDS = 5
WORKERS = "data.num_workers", "by another command: python scripts/tune.py workers"


class Process:
    """A contender's process, which waits for its turn.

    Args:
        cfg: of its training command.
        folder: for what it writes.
        draws_otherwise: see ``train_by_turns``.
    """

    def __init__(self, cfg: Any, folder: str, draws_otherwise: bool = False) -> None:
        # A fork of a process that has imported everything, and has no thread and no GPU.
        context = get_context("forkserver")
        context.set_forkserver_preload(["harness.tuning.contender"])
        # What a killed process leaves is removed; nobody needs to read that.
        sys.warnoptions.append("ignore:resource_tracker")
        self.connection, others = context.Pipe()
        arguments = (others, cfg, allowed.followed(), folder, draws_otherwise)
        self.process = context.Process(target=train_by_turns, args=arguments)
        self.process.start()
        others.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()  # which it notices when it waits for an order
        self.process.join(END_SECONDS)
        self.process.kill()
        self.process.join()

    def answer(self, order: Any = None, wait_seconds: float | None = None) -> Any:
        """Give an order, and wait for what comes of it.

        Raises:
            UserError: with the reason why there is no answer.
        """
        try:
            if order is not None:
                self.connection.send(order)
            if not self.connection.poll(wait_seconds):
                raise UserError(f"not ready within {wait_seconds:.0f} s: a larger --seconds waits")
            answer = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            self.process.join()
            raise UserError(f"the process died (exit code {self.process.exitcode})") from error
        if isinstance(answer, Failed):
            raise UserError(answer.sentence)
        return answer


@dataclass
class Trial:
    """What a switch has come to."""

    words: tuple[str, ...]
    tolerance: float
    why_not: str = ""  # why there is nothing to say of it
    difference: float = math.nan  # of the losses, as a share of the plain run's
    turns: list[tuple[Turn, Turn]] = field(default_factory=list)  # the plain run's, and its own
    starting_seconds: float = 0.0  # of the first steps, beyond what steps take

    @property
    def ratios(self) -> list[float]:
        """Its speed by that of the plain run, by turns."""
        return [own.samples_per_second / plain.samples_per_second for plain, own in self.turns]

    @property
    def gain(self) -> float:
        """The median of its speed by the plain run's."""
        return median(self.ratios) if self.ratios else 0.0

    @property
    def is_winner(self) -> bool:
        """Whether its loss follows, and it was the faster one in every turn."""
        return not self.why_not and min(self.ratios) > 1 and self.gain >= WORTH

    def pays_after(self, first: "First") -> int:
        """Batches after which a start of seconds is made good; 0 for a start that takes none."""
        saved = median(first.seconds) * (1 - 1 / self.gain)
        return round(self.starting_seconds / saved) if self.starting_seconds >= 1 else 0

    def row(self) -> str:
        """Its line of the table."""
        words, why_not = " ".join(self.words), self.why_not.partition("\n")[0]
        if not self.turns:
            return f"{words:30} {why_not}"
        said = why_not or ("" if self.is_winner else "no gain beyond noise")
        spread = f"{self.gain:.2f} ({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        loss = f"{self.difference:.0e} of {self.tolerance:.0e}"
        speed, memory = measured([own for _, own in self.turns])
        numbers = f"{speed} {spread:>21} {loss:>16} {memory} {self.starting_seconds:7.1f} s"
        return f"{words:30} {numbers}  {said}".rstrip()


def measured(turns: list[Turn]) -> tuple[str, str]:
    """Columns of the table: samples per second, and the peak of memory."""
    speed = median(turn.samples_per_second for turn in turns)
    return f"{speed:11,.0f}", f"{max(turn.peak_bytes for turn in turns) / 2**20:8,.0f} MiB"


def choose_switches(
    overrides: list[str], seconds: float, conf: str | Path = "conf"
) -> tuple[str, ...]:
    """Try every switch, and those that gain together; a table of it is printed.

    Args:
        overrides: what train.py takes.
        seconds: in all, but for compiling, which may take as long again.
        conf: the folder of the config files.

    Returns:
        The words of the switches that are worth it.

    Raises:
        UserError: if there are none, or the plain run does not train.
    """
    end = time.monotonic() + seconds
    cfg = composed(overrides, conf)
    gpus.choose(cfg)  # once for all
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        plain = stack.enter_context(Process(_visible(cfg), folder))
        ready: Ready = plain.answer()
        others = [one for one in ready.switches if not one.why_not]
        num_steps = max(1, int(min(MOST_STEPS, ready.num_steps)))
        first: First = plain.answer((num_steps, seconds / 10))
        _check_plain(first)
        unit = "samples/s" if first.is_counted else "batches/s"
        titles = f"{unit:>11} {'speed, of plain':>21} {'loss differs by':>16} {'peak memory':>12}"
        print(f"{'':30} {titles} {'start':>9}")
        trials = [Trial(s.words, s.tolerance, s.why_not) for s in ready.switches]
        for trial in trials:
            if first.draws and trial.words == ("compile=true",) and not trial.why_not:
                trial.tolerance += _noise(cfg, folder, first)

        def run(trial: Trial, num_left: int) -> None:
            share = max(0.0, end - time.monotonic()) / num_left
            try:
                chosen = _visible(composed([*overrides, *trial.words], conf))
                with Process(chosen, folder) as process:
                    _compete(trial, process, plain, first, share, seconds)
            except UserError as error:
                trial.why_not = str(error)
            print(trial.row(), flush=True)

        num_left = len(others) + 1
        for trial in trials:
            if trial.why_not:
                print(trial.row(), flush=True)
            else:
                run(trial, num_left)
                num_left -= 1
        print(f"{WORKERS[0]:30} {WORKERS[1]}")
        if turns := [turn for trial in trials for turn, _ in trial.turns]:
            speed, memory = measured(turns)
            compared = f"losses of {len(first.seconds)} steps compared"
            print(f"{'the plain run':30} {speed} {compared:>38} {memory}")
        winners = sorted((t for t in trials if t.is_winner), key=lambda t: -t.gain)
        if len(winners) > 1:
            words = [word for trial in winners for word in trial.words]
            together = Trial(tuple(words), max(t.tolerance for t in winners))
            run(together, 1)
            winners = sorted([together, *winners], key=lambda t: -t.gain * t.is_winner)
    if winners and (later := winners[0].pays_after(first)):
        print(f"Its start of {winners[0].starting_seconds:.0f} s pays after {later:,} batches.")
    if num_processes(cfg.trainer) > 1:
        print("Measured in one process, with its share of each batch; gradients were not reduced.")
    if not winners:
        raise UserError("No switch gains more than this machine's noise: train.py stays as it is.")
    return winners[0].words


def _visible(cfg: Any) -> Any:
    """The config without a choice of GPUs, which has been made."""
    if "gpus" in cfg:
        cfg.gpus = {"order": "visible"}
    return cfg


def _check_plain(first: First) -> None:
    if not first.losses:
        raise UserError(
            "tune.py speed compares losses, and no step has a backward pass that Lightning knows "
            "of:\nreturn the loss from training_step, or use self.manual_backward(loss)."
        )
    if not all(map(math.isfinite, first.losses)):
        raise UserError("The plain run's loss is not finite in its first steps: mend that first.")


def _noise(cfg: Any, folder: str, plain: First) -> float:
    """How far losses are apart where steps draw other random numbers, as compiled ones do."""
    with Process(cfg, folder, draws_otherwise=True) as process:
        process.answer()
        return 2 * difference(plain, process.answer((len(plain.seconds), math.inf)))


def difference(plain: First, other: First) -> float:
    """The largest difference of losses, as a share of their mean.

    Raises:
        UserError: if the losses cannot be compared, or are not finite.
    """
    if len(plain.losses) != len(other.losses):
        raise UserError(f"{len(other.losses)} losses instead of {len(plain.losses)}")
    bad = [i for i, loss in enumerate(other.losses, 1) if not math.isfinite(loss)]
    if bad:
        raise UserError(f"the loss is {other.losses[bad[0] - 1]} at step {bad[0]}")
    mean = sum(map(abs, plain.losses)) / len(plain.losses)
    pairs = zip(plain.losses, other.losses, strict=True)
    return max(abs(a - b) for a, b in pairs) / (mean or 1.0)


def _compete(
    trial: Trial, process: Process, plain: Process, first: First, share: float, patience: float
) -> None:
    """Fill in a trial.

    Args:
        trial: of the switch.
        process: with the switch.
        plain: without.
        first: what plain's first steps came to.
        share: seconds for all of it, but for compiling.
        patience: seconds for that.
    """
    started = time.monotonic()
    process.answer(wait_seconds=share + patience)
    order = len(first.seconds), math.inf
    other: First = process.answer(order, wait_seconds=share + patience)
    trial.starting_seconds = max(
        0.0, sum(other.seconds) - len(other.seconds) * median(other.seconds)
    )
    share = max(0.0, share - (time.monotonic() - started) + trial.starting_seconds)
    trial.difference = difference(first, other)
    if not trial.difference <= trial.tolerance:
        trial.why_not = f"the loss does not follow: {trial.difference:.0e} apart"
    end = time.monotonic() + share
    while len(trial.turns) < LEAST_TURNS or (
        len(trial.turns) < NUM_TURNS and time.monotonic() < end
    ):
        turns: list[Turn] = [one.answer(share / NUM_TURNS / 2) for one in (plain, process)]
        trial.turns.append((turns[0], turns[1]))
        if turns[0].is_finite and not turns[1].is_finite and not trial.why_not:
            trial.why_not = "the loss is no longer finite after some steps"
