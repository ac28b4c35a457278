"""Print a line per epoch, and per validation inside one, that stays on the screen and in run.log.

In: the values of ``on_values``. Out: lines on stdout, which may be a file, and in ``run.log``.
"""

import logging
import re
import shutil
import time

import pytorch_lightning as pl

from harness.errors import printable

log = logging.getLogger(__name__)
ELSEWHERE = re.compile("^lr-|_step$|^epoch$|^step$")  # what the line has already, or nobody follows

OF_EPOCH = re.compile("_epoch$")  # the value of train/loss has the name train/loss_epoch as well


class EpochLines(pl.Callback):
    """Print the values of each epoch, aligned, in one line of the terminal.

    A value that is logged at steps alone is that of the epoch's last row. Where a line has no room
    for all values, it keeps the objective longest.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self.start = time.monotonic()
        self.found: dict[str, float] = {}  # values of the running epoch
        self.widths: dict[str, int] = {}  # of the columns, in their order

    def on_values(
        self, trainer: pl.Trainer, stage: str, epoch: int, step: int, values: dict[str, float]
    ) -> None:
        """Keep values until their epoch ends; print those of a validation inside it at once."""
        if not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        if stage == "validate" and not trainer.is_last_batch:
            self.print(trainer, {"epoch": str(epoch), "step": str(step)}, values)
            return
        self.found |= values
        if stage == "train_epoch":
            now = time.monotonic()
            seconds = f"{now - self.start:.1f} s"
            self.print(trainer, {"epoch": str(epoch)}, self.found, seconds)
            self.start, self.found = now, {}

    def print(
        self, trainer: pl.Trainer, first: dict[str, str], values: dict[str, float], last: str = ""
    ) -> None:
        """Print values as far as a line of the terminal has room: the objective first."""
        names = [n for n in values if not ELSEWHERE.search(n)]
        names = [n for n in names if n == (plain := OF_EPOCH.sub("", n)) or plain not in values]
        cells = first | {name: number(values[name]) for name in names}
        for name, text in cells.items():
            self.widths[name] = max(self.widths.get(name, 0), len(text))
        columns = [*first, *(name for name in self.widths if name not in ("epoch", "step"))]
        columns.sort(key=lambda name: (name not in first, not name.startswith("train")))
        monitor = getattr(trainer.checkpoint_callback, "monitor", None)
        room = shutil.get_terminal_size().columns - len(last)
        kept = set[str]()
        wanted = sorted(columns, key=lambda n: (n not in first, n != monitor, "loss" not in n))
        for name in wanted:
            if (width := len(name) + self.widths[name] + 3) <= room or name in first:
                kept.add(name)
                room -= width
        # A value that this line lacks leaves its place empty, so that the others stay below theirs.
        texts = {name: f"{name} {cells[name]}" if name in cells else "" for name in columns}
        parts = [texts[n].ljust(len(n) + 1 + self.widths[n]) for n in columns if n in kept]
        while not parts[-1].strip():
            parts.pop()
        line = printable("  ".join([*parts, last]).rstrip())
        log.info("%s", line)
        print(line, flush=True)


def number(value: float) -> str:
    """Return a number with three digits behind the point, or three in all."""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1e5 else f"{value:.3g}"
