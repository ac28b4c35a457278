"""What it costs to be able to stop: per step, and per checkpoint.

    python benchmarks/checkpoint.py [--repeats 7] [--megabytes 64] [--json checkpoint.json]

The hooks of the callbacks that make a run resumable, per step; and what training waits for a
checkpoint, against one write of its bytes with sync.
"""

import os
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
from pytorch_lightning.demos.boring_classes import BoringModel

from harness.checkpoints.safe_point import SafePoint
from harness.checkpoints.writing import DurableCheckpointIO
from harness.exact.seeded_steps import SeededSteps

NUM_STEPS = 64  # as many as BoringModel has samples


def bookkeeping(folder: Path) -> float:
    """Return the milliseconds per step that are spent in the hooks."""
    spent = [0.0]

    def timed(hook: Callable[..., None], *arguments: Any, **named: Any) -> None:
        started = time.perf_counter()
        hook(*arguments, **named)
        spent[0] += time.perf_counter() - started

    callbacks: list[pl.Callback] = [SafePoint(folder, every_minutes=10), SeededSteps(seed=0)]
    for callback in callbacks:
        for name in ("on_train_batch_start", "on_train_batch_end"):
            setattr(callback, name, partial(timed, getattr(callback, name)))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=NUM_STEPS,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        plugins=[DurableCheckpointIO()],
    )
    trainer.fit(BoringModel())
    return spent[0] / NUM_STEPS * 1e3


def write_once(data: bytes, path: Path) -> None:
    """Do the least that a durable file needs."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=7)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    # As a model of several layers with its optimizer's two moments has them.
    size = options.megabytes * 2**20 // 4 // 24
    checkpoint = {f"tensor_{i}": torch.randn(size) for i in range(24)}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path = Path(name, "a.ckpt")
        durable, lightning = DurableCheckpointIO(), TorchCheckpointIO()
        durable.save_checkpoint(checkpoint, path)
        contenders: dict[str, Callable[[], None]] = {
            "one write with sync": partial(write_once, path.read_bytes(), Path(name, "plain")),
            "training waits": partial(durable.save_checkpoint, checkpoint, path, lambda: None),
            "until it is safe": partial(durable.save_checkpoint, checkpoint, path),
            "Lightning's, no sync": partial(
                lightning.save_checkpoint, checkpoint, Path(name, "b.ckpt")
            ),
        }

        def milliseconds(function: Callable[[], None]) -> float:
            durable.finish()
            started = time.perf_counter()
            function()
            return (time.perf_counter() - started) * 1e3

        turns = {name: partial(milliseconds, function) for name, function in contenders.items()}
        writes = contest.take_turns(turns, options.repeats)
        durable.finish()
        steps = [bookkeeping(Path(name)) for _ in range(options.repeats)]
    contest.show(f"{options.megabytes} MB", "ms", writes, decimals=0)
    print(f"\nbookkeeping per step: {contest.spread(steps, 3)} ms")
    contest.write(options.json, {"bookkeeping": steps, "writes": writes})


if __name__ == "__main__":
    main()
