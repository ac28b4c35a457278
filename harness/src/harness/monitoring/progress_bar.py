"""Show the progress of a run on the screen; ``breakpoint()`` ends the bar."""

import inspect
import os
import sys
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar
from rich import get_console
from rich.progress import BarColumn, ProgressColumn, Task
from rich.text import Text

BAR_WIDTH = 10
SPEED_WIDTH = 12  # of "12345.67it/s"
TIME_WIDTH = 17  # of "0:00:00 • 0:00:00"


class Speed(ProgressColumn):
    """Show batches per second. Lightning's column shows 0.00 until the bar is drawn twice."""

    def render(self, task: Task) -> Text:
        """Return the recent speed of the task, or its speed since the start."""
        seconds = task.finished_time or task.elapsed
        speed = task.speed or (task.completed / seconds if seconds else 0)
        return Text(f"{speed:.2f}it/s" if speed else "", style="dim underline")


class ProgressBar(RichProgressBar):
    """Show Lightning's bar in one line, with as many metrics as fit.

    The metrics are updated only when the bar is drawn. Lightning would update them after each
    batch, and synchronise with the device each time. If stdout is a file, there is no bar.

    Args:
        refresh_rate: how many times per second the bar is drawn; 0 for no bar.
        console_kwargs: see ``RichProgressBar``.
        **kwargs: other arguments of ``RichProgressBar``.
    """

    updated_time = 0.0

    def __init__(
        self, refresh_rate: int = 5, console_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        # The terminal wraps messages above the bar, so that a path in them can be copied.
        console_kwargs = {"soft_wrap": True} | (console_kwargs or {})
        super().__init__(refresh_rate, console_kwargs=console_kwargs, **kwargs)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make ``breakpoint()`` end the bar, which would draw over the debugger's prompt."""
        super().setup(trainer, pl_module, stage)
        console = get_console()
        if not (console.is_terminal or console.is_jupyter):
            self.disable()
        if self.is_enabled and "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = self._debug

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Restore Python's own ``breakpoint()``."""
        sys.breakpointhook = sys.__breakpointhook__
        super().teardown(trainer, pl_module, stage)

    def _debug(self, *_: Any, **__: Any) -> None:
        import pdb  # only debugging needs it

        self.disable()
        if self.progress is not None:
            self.progress.stop()
        pdb.Pdb().set_trace(inspect.currentframe().f_back)  # type: ignore[union-attr]

    def on_train_batch_end(self, trainer: pl.Trainer, *batch: Any) -> None:
        """Update the bar if it is due, or after the last batch."""
        *_, batch_idx = batch
        is_last = batch_idx + 1 == trainer.num_training_batches
        now = time.monotonic()
        if is_last or (now - self.updated_time) * self.refresh_rate >= 1:
            self.updated_time = now
            super().on_train_batch_end(trainer, *batch)

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Shorten the bar to leave space for metrics, and show the speed from the first batch."""
        *columns, _ = super().configure_columns(trainer)
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = BAR_WIDTH
        return [*columns, Speed()]

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return as many metrics as fit into the line, without the logger's version."""
        if self.progress is None:
            return {}
        task = self.train_progress_bar
        texts = [task.description, f"{task.total}/{task.total}"]
        free_width = self.progress.console.width - BAR_WIDTH - TIME_WIDTH - SPEED_WIDTH
        free_width -= sum(len(text) + 1 for text in texts) + 3
        kept = {}
        for name, value in super().get_metrics(trainer, pl_module).items():
            if name != "v_num" and (width := len(f"{name}: {value:.3f} ")) <= free_width:
                kept[name] = value
                free_width -= width
        return kept
