"""Print a line per epoch, and per validation inside one, that stays on the screen and in run.log.

In: the values of ``on_values``. Out: lines on stdout, which may be a file, and in ``run.log``.
"""

import logging
import re
import time
from typing import Any

import pytorch_lightning as pl
from rich import get_console

from harness.errors import printable

log = logging.getLogger(__name__)
ELSEWHERE = re.compile("^lr-|_step$|^epoch$|^step$")  # what the line has already, or nobody follows

OF_EPOCH = re.compile("_epoch$")  # the value of train/loss has the name train/loss_epoch as well


class EpochLines(pl.Callback):
    """Print the values of each epoch, aligned, in one line of the terminal.

    A value that is logged at steps alone is the mean of the epoch's rows. Where a terminal has no
    room for all values, the line keeps the objective longest; a file and ``run.log`` get all.
    """

    def __init__(self) -> None:
        self.sums: dict[
            str, tuple[float, int]
        ] = {}  # of the running epoch's rows, and their number
        self.found: dict[str, float] = {}  # values of its end
        self.widths: dict[str, int] = {}  # of the columns, in their order

    def state_dict(self) -> dict[str, Any]:
        """Keep what a resumed epoch has had."""
        return {"sums": self.sums, "found": self.found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what the epoch has had."""
        self.sums, self.found = state_dict["sums"], state_dict["found"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self.start = time.monotonic()

    def on_values(
        self, trainer: pl.Trainer, stage: str, epoch: int, step: int, values: dict[str, float]
    ) -> None:
        """Keep values until their epoch ends; print those of a validation inside it at once."""
        if not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        if stage == "validate" and not trainer.is_last_batch:
            self.show(trainer, {"epoch": str(epoch), "step": str(step)}, values)
            return
        for name, value in values.items():
            # Of a value that has a mean over the epoch, its steps have a name of their own.
            is_mean = f"{name}_step" in self.sums and stage == "train_epoch"
            if stage == "train_step" or (name in self.sums and not is_mean):
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = total + value, count + 1
            else:
                self.found[name] = value
        if stage == "train_epoch":
            now = time.monotonic()
            means = {name: total / count for name, (total, count) in self.sums.items()}
            seconds = f"{now - self.start:.1f} s"
            self.show(trainer, {"epoch": str(epoch)}, means | self.found, seconds)
            self.start, self.sums, self.found = now, {}, {}

    def show(
        self, trainer: pl.Trainer, first: dict[str, str], values: dict[str, float], last: str = ""
    ) -> None:
        """Print values, on a terminal as far as a line has room: the objective first."""
        names = [n for n in values if not ELSEWHERE.search(n)]
        names = [n for n in names if n == (plain := OF_EPOCH.sub("", n)) or plain not in values]
        cells = first | {name: number(values[name]) for name in names}
        for name, text in cells.items():
            self.widths[name] = max(self.widths.get(name, 0), len(text))
        names = [*first, *sorted(names, key=lambda name: not name.startswith("train"))]
        texts = [f"{name} {cells[name]}".ljust(len(name) + 1 + self.widths[name]) for name in names]
        log.info("%s", joined([*texts, last]))
        if get_console().is_terminal:
            room = get_console().width - len(last)
            monitor = getattr(trainer.checkpoint_callback, "monitor", None)
            must = {*first, monitor}
            kept = set[str]()
            for name in sorted(names, key=lambda n: (n not in must, "loss" not in n)):
                width = len(texts[names.index(name)]) + 2
                if width <= room or name in must:
                    kept.add(name)
                    room -= width
            texts = [text for name, text in zip(names, texts, strict=True) if name in kept]
        print(joined([*texts, last]), flush=True)


def joined(texts: list[str]) -> str:
    """Return the cells of a line."""
    return printable("  ".join(texts).rstrip())


def number(value: float) -> str:
    """Return a number with three digits behind the point, or three in all."""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1e5 else f"{value:.3g}"
