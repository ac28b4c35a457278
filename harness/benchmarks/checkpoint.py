"""What it costs to be able to stop: per step, and per checkpoint.

    python benchmarks/checkpoint.py [--repeats 7] [--megabytes 64] [--json checkpoint.json]

Steps of 50 ms (they wait) with the callbacks that make a run resumable, and without them; and a
checkpoint's stall against one write of its bytes with sync. Contenders are interleaved, so that a
busy machine slows all of them alike: read the ratios.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import contest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from harness.checkpoints.safe_point import SafePoint
from harness.checkpoints.writing import DurableCheckpointIO
from harness.exact.seeded_steps import SeededSteps

STEP_SECONDS, STEPS = 0.05, 40
GOAL_STEP, GOAL_STALL = 0.01, 1.0


class Timed(pl.Callback):
    """Measure what one callback adds to each step: the time that its hooks take."""

    def __init__(self, callback: pl.Callback) -> None:
        self.callback, self.seconds = callback, 0.0

    def timed(self, hook: str) -> Callable[..., None]:
        """The hook, with a clock around it."""
        function = getattr(self.callback, hook)

        def call(*arguments: Any, **kwargs: Any) -> None:
            started = time.perf_counter()
            function(*arguments, **kwargs)
            self.seconds += time.perf_counter() - started

        return call


class Waiting(pl.LightningModule):
    """A step that takes 50 ms of another device's time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Wait."""
        time.sleep(STEP_SECONDS)
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One that changes nothing."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


def bookkeeping(folder: Path) -> float:
    """Seconds per step spent in the hooks that make a run resumable."""
    timed = []
    for callback in (SafePoint(folder, every_minutes=10), SeededSteps(seed=0)):
        measured = Timed(callback)
        for hook in ("on_train_batch_start", "on_train_batch_end"):
            setattr(callback, hook, measured.timed(hook))
        timed.append(measured)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[measured.callback for measured in timed],
        plugins=[DurableCheckpointIO()],
        default_root_dir=folder,
    )
    trainer.fit(Waiting(), DataLoader(TensorDataset(torch.zeros(STEPS, 2))))
    return sum(measured.seconds for measured in timed) / STEPS


def write_once(data: bytes, path: Path) -> None:
    """The least that a durable file needs."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def seconds(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=7)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    # As a model of several layers with its optimizer's two moments has them.
    values = options.megabytes * 2**20 // 4
    checkpoint = {f"tensor_{i}": torch.randn(values // 24) for i in range(24)}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        durable, lightning = DurableCheckpointIO(), TorchCheckpointIO()
        durable.save_checkpoint(checkpoint, folder / "a.ckpt")
        data = (folder / "a.ckpt").read_bytes()

        def milliseconds(function: Callable[[], None]) -> float:
            durable.finish()
            return seconds(function) * 1e3

        contenders: dict[str, Callable[[], None]] = {
            "one write with sync": lambda: write_once(data, folder / "plain"),
            "durable, training waits": lambda: durable.save_checkpoint(
                checkpoint, folder / "a.ckpt", lambda: None
            ),
            "durable, until it is safe": lambda: durable.save_checkpoint(
                checkpoint, folder / "a.ckpt"
            ),
            "Lightning's, no sync": lambda: lightning.save_checkpoint(
                checkpoint, folder / "b.ckpt"
            ),
        }
        turns = {name: partial(milliseconds, function) for name, function in contenders.items()}
        writes = contest.take_turns(turns, options.repeats)
        durable.finish()
        steps = [bookkeeping(folder) * 1e6 for _ in range(options.repeats)]
    print(contest.machine())
    share = statistics.median(steps) * 1e-6 / STEP_SECONDS
    print(f"bookkeeping per step, microseconds {contest.spread(steps, 0)}")
    print(f"share of a 50 ms step {share:.4f}, goal {GOAL_STEP}\n")
    print(f"{options.megabytes} MB {'':19} milliseconds (min - max)     of one write (min - max)")
    for name, times in writes.items():
        of_one_write = contest.ratio(times, writes["one write with sync"])
        print(f"{name:25} {contest.spread(times, 0):28} {of_one_write}")
    print(f"goal of what training waits for: {GOAL_STALL} of one write")
    contest.write(options.json, {"bookkeeping": steps, "writes": writes})


if __name__ == "__main__":
    main()
