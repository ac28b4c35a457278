"""Where the time of some steps goes, and a trace of them: ``debug=trace``."""

import re
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.profilers import Profiler
from torch.profiler import ProfilerActivity, record_function, schedule

from harness.places import shown
from harness.processes.launch import global_rank
from harness.upstream.step_flops import hushed

# The innermost range that has one of these names decides what its time was spent on.
PARTS = {
    "data": r"train_dataloader_next$|_to_device$|_batch_transfer$",
    "validation": r"validation|\.val_next$|\.on_sanity_check",
    "callbacks and logging": r"^\[Callback\]|^\[LightningModule\].*\.on_train|save_checkpoint",
    "optimizer": r"^Optimizer\.|optimizer_step$|optimizer_zero_grad$",
    "backward": r"^autograd::|\.backward$",
    "forward": r"\.training_step$",
}
REST, BATCH = "loop", "run_training_batch"
ALL_REDUCE = re.compile(r"^(gloo|nccl|mpi|c10d):+all_?reduce", re.IGNORECASE)
MEASURED = re.compile(r"\.(training_step|backward|optimizer_step)$")


class Trace(Profiler):
    """Trace some training steps, and divide their time.

    Each process writes ``trace_<rank>.json.gz``, which https://ui.perfetto.dev opens; the table is
    of the first one. On a GPU a forward, a backward and an optimizer's step wait for the device
    before they end, while they are traced: their seconds are the device's.

    Args:
        dirpath: where the files go.
        num_before: batches that warm up, one of them the profiler.
        num_steps: batches that are traced, or fewer where training ends.
    """

    def __init__(self, dirpath: str | Path, num_before: int = 10, num_steps: int = 10) -> None:
        super().__init__(dirpath=dirpath, filename="trace")
        self.num_before, self.num_steps = num_before, num_steps
        self.traced: torch.profiler.profile | None = None
        self.ranges: dict[str, record_function] = {}
        self.lines: list[str] = []

    def start(self, action_name: str) -> None:
        """Begin a range of the trace."""
        if self.traced is None and action_name.endswith("train_dataloader_next"):
            self._begin()
        if self.traced is not None and action_name not in self.ranges:
            self.ranges[action_name] = record_function(action_name)
            self.ranges[action_name].__enter__()  # type: ignore[no-untyped-call]

    def stop(self, action_name: str) -> None:
        """End it; a step ends with its batch."""
        if action_name in self.ranges:
            if MEASURED.search(action_name) and torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ranges.pop(action_name).__exit__(None, None, None)
        if self.traced is not None and action_name == BATCH:
            with hushed():
                self.traced.step()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self.traced = torch.profiler.profile(
            activities=activities,
            schedule=schedule(wait=self.num_before - 1, warmup=1, active=self.num_steps, repeat=1),
            on_trace_ready=self._write,
        )
        with hushed():
            self.traced.start()

    def _write(self, traced: torch.profiler.profile) -> None:
        assert self.dirpath is not None
        path = Path(self.dirpath, f"trace_{global_rank()}.json.gz")
        traced.export_chrome_trace(str(path))
        events = traced.events()  # type: ignore[no-untyped-call]
        self.lines = [*table(events), f"{shown(path)} opens in https://ui.perfetto.dev"]

    def summary(self) -> str:
        """The table."""
        return "\n".join(
            self.lines
            or [
                f"No trace: there were no more than {self.num_before} batches. Several optimizers "
                "count for several steps: trainer.max_steps=100 has room for them."
            ]
        )

    def describe(self) -> None:
        """Write the table, and show it."""
        if self.traced is not None:
            with hushed():
                self.traced.stop()
            self.traced = None
        if global_rank() == 0:
            print(f"\n{self.summary()}\n", flush=True)
            super().describe()


def table(events: Any) -> list[str]:
    """A line for each part of a step: milliseconds, and the share of the whole.

    Args:
        events: of steps, as ``torch.profiler.profile.events`` returns them.
    """
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0) | {REST: 0.0}
    steps = [event for event in events if event.name.startswith("ProfilerStep")]
    # What follows the last batch is none.
    steps = [step for step in steps if any(c.name == BATCH for c in step.cpu_children)]
    waiting = [(step, REST) for step in steps]
    while waiting:
        event, outer = waiting.pop()
        part = next((name for name, text in PARTS.items() if re.search(text, event.name)), outer)
        inside = [(child, part) for child in event.cpu_children]
        spent[part] += event.cpu_time_total - sum(child.cpu_time_total for child, _ in inside)
        waiting += inside
    whole, num = sum(spent.values()) or 1.0, max(1, len(steps))
    lines = [f"{'of a step':<24}{'ms':>10}{'share':>8}   ({len(steps)} steps)"]
    for name, microseconds in spent.items():
        lines.append(f"{name:<24}{microseconds / num / 1000:>10.3f}{microseconds / whole:>8.1%}")
    reducing = sum(
        event.time_range.elapsed_us() for event in events if ALL_REDUCE.search(event.name)
    )
    if reducing:
        lines.append(f"{'all-reduce, meanwhile':<24}{reducing / num / 1000:>10.3f}")
    return lines
