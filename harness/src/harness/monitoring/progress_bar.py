"""Show the progress of a run on the screen, and give the screen to a debugger that asks for it."""

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
    """Batches per second; Lightning's column says 0.00 until the bar was drawn twice."""

    def render(self, task: Task) -> Text:
        """Show the speed of the task since its start where there is no newer one."""
        seconds = task.finished_time or task.elapsed
        speed = task.speed or (task.completed / seconds if seconds else 0)
        return Text(f"{speed:.2f}it/s" if speed else "", style="dim underline")


class ProgressBar(RichProgressBar):
    """Show Lightning's bar in one line, with the metrics that fit, updated only when it is drawn.

    Lightning updates it after each batch, and reads the metrics from the device for that. Where
    stdout is a file, there is no bar.

    Args:
        refresh_rate: times a second that it is drawn; 0 for no bar.
        console_kwargs: see ``RichProgressBar``, as for the others.
        **kwargs: its other arguments.
    """

    updated_time = 0.0

    def __init__(
        self, refresh_rate: int = 5, console_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        # Messages above the bar are wrapped by the terminal: a path in them can be copied.
        how = {"soft_wrap": True} | (console_kwargs or {})
        super().__init__(refresh_rate, console_kwargs=how, **kwargs)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let ``breakpoint()`` end the bar, which would draw over the debugger's prompt."""
        super().setup(trainer, pl_module, stage)
        console = get_console()
        if not (console.is_terminal or console.is_jupyter):
            self.disable()
        if self.is_enabled and "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = self._debug

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give ``breakpoint()`` back its own way."""
        sys.breakpointhook = sys.__breakpointhook__
        super().teardown(trainer, pl_module, stage)

    def _debug(self, *_: Any, **__: Any) -> None:
        import pdb  # only debugging needs it

        self.disable()
        if self.progress is not None:
            self.progress.stop()
        pdb.Pdb().set_trace(inspect.currentframe().f_back)  # type: ignore[union-attr]

    def on_train_batch_end(self, trainer: pl.Trainer, *batch: Any) -> None:
        """Show the batch, if it is time."""
        *_, batch_idx = batch
        is_last = batch_idx + 1 == trainer.num_training_batches
        now = time.monotonic()
        if is_last or (now - self.updated_time) * self.refresh_rate >= 1:
            self.updated_time = now
            super().on_train_batch_end(trainer, *batch)

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Leave room for metrics in a line, and show the speed from the first batch on."""
        *columns, _ = super().configure_columns(trainer)
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = BAR_WIDTH
        return [*columns, Speed()]

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Return as many metrics as the line has room for, without the logger's version."""
        if self.progress is None:
            return {}
        task = self.train_progress_bar
        texts = [task.description, f"{task.total}/{task.total}"]
        room = self.progress.console.width - BAR_WIDTH - TIME_WIDTH - SPEED_WIDTH
        room -= sum(len(text) + 1 for text in texts) + 3
        kept = {}
        for name, value in super().get_metrics(trainer, pl_module).items():
            if name != "v_num" and (width := len(f"{name}: {value:.3f} ")) <= room:
                kept[name] = value
                room -= width
        return kept
