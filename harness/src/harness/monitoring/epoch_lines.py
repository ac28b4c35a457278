"""Print one line per epoch, and one per validation inside an epoch.

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
HIDDEN_NAMES = re.compile("^lr-|_step$|^epoch$|^step$")  # rates, and values shown in another way
EPOCH_SUFFIX = re.compile("_epoch$")  # Lightning logs train/loss as train/loss_epoch as well


class EpochLines(pl.Callback):
    """Print the values of each epoch, aligned, in one line of the terminal.

    A value that is logged only at steps is averaged over the epoch. If the values do not fit into
    the terminal's width, the line keeps the objective and the losses first. A file and ``run.log``
    get all values.
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}  # of the epoch's step values, and their number
        self.epoch_values: dict[str, float] = {}  # values that are logged once in the epoch
        self.widths: dict[str, int] = {}  # of the columns, by name

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the running epoch, so that a resumed epoch keeps them."""
        return {"sums": self.sums, "found": self.epoch_values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the values of the running epoch."""
        self.sums, self.epoch_values = state_dict["sums"], state_dict["found"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to time the first epoch."""
        self.start = time.monotonic()

    def on_values(
        self, trainer: pl.Trainer, stage: str, epoch: int, step: int, values: dict[str, float]
    ) -> None:
        """Collect values until their epoch ends; print a validation inside an epoch at once."""
        if not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        if stage == "validate" and not trainer.is_last_batch:
            self.print_values(trainer, {"epoch": str(epoch), "step": str(step)}, values)
            return
        for name, value in values.items():
            # If a value has a mean over the epoch, Lightning logs its step values as <name>_step.
            is_mean = f"{name}_step" in self.sums and stage == "train_epoch"
            if stage == "train_step" or (name in self.sums and not is_mean):
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = total + value, count + 1
            else:
                self.epoch_values[name] = value
        if stage == "train_epoch":
            now = time.monotonic()
            means = {name: total / count for name, (total, count) in self.sums.items()}
            seconds = f"{now - self.start:.1f} s"
            self.print_values(trainer, {"epoch": str(epoch)}, means | self.epoch_values, seconds)
            self.start, self.sums, self.epoch_values = now, {}, {}

    def print_values(
        self, trainer: pl.Trainer, first: dict[str, str], values: dict[str, float], last: str = ""
    ) -> None:
        """Print values in one line; on a terminal, only as many as fit into its width."""
        names = [n for n in values if not HIDDEN_NAMES.search(n)]
        names = [n for n in names if n == (plain := EPOCH_SUFFIX.sub("", n)) or plain not in values]
        cells = first | {name: format_number(values[name]) for name in names}
        for name, text in cells.items():
            self.widths[name] = max(self.widths.get(name, 0), len(text))
        names = [*first, *sorted(names, key=lambda name: not name.startswith("train"))]
        texts = [f"{name} {cells[name]}".ljust(len(name) + 1 + self.widths[name]) for name in names]
        log.info("%s", join_cells([*texts, last]))
        if get_console().is_terminal:
            free_width = get_console().width - len(last)
            monitor = getattr(trainer.checkpoint_callback, "monitor", None)
            required = {*first, monitor}
            kept = set[str]()
            for name in sorted(names, key=lambda n: (n not in required, "loss" not in n)):
                width = len(texts[names.index(name)]) + 2
                if width <= free_width or name in required:
                    kept.add(name)
                    free_width -= width
            texts = [text for name, text in zip(names, texts, strict=True) if name in kept]
        print(join_cells([*texts, last]), flush=True)


def join_cells(texts: list[str]) -> str:
    """Join the cells of a line, without characters that the terminal cannot print."""
    return printable("  ".join(texts).rstrip())


def format_number(value: float) -> str:
    """Format a number with three decimals; if it is tiny or huge, with three digits in all."""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1e5 else f"{value:.3g}"
