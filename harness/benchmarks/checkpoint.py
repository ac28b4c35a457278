"""Measure how long training waits for a checkpoint, beside one write and sync of the same bytes.

    python benchmarks/checkpoint.py [--repeats 7] [--megabytes 64]

overhead.py measures how much longer the steps of a resumable run take.
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import contest
import torch

from harness.checkpoints.writing import DurableCheckpointIO


def write_once(data: bytes, path: Path) -> None:
    """Do the least that a durable file needs."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    parser = contest.arguments(__doc__ or "", repeats=7)
    parser.add_argument("--megabytes", type=int, default=64)
    options = parser.parse_args()
    # As a model of several layers with its optimizer's two moments has them.
    size = options.megabytes * 2**20 // 4 // 24
    checkpoint = {f"tensor_{i}": torch.randn(size) for i in range(24)}
    with tempfile.TemporaryDirectory(dir=os.curdir) as name:
        path = Path(name, "a.ckpt")
        durable = DurableCheckpointIO()
        durable.save_checkpoint(checkpoint, path)
        contenders: dict[str, Callable[[], None]] = {
            "one write with sync": partial(write_once, path.read_bytes(), Path(name, "plain")),
            "training waits": partial(durable.save_checkpoint, checkpoint, path, lambda: None),
            "until it is safe": partial(durable.save_checkpoint, checkpoint, path),
        }

        def milliseconds(function: Callable[[], None]) -> float:
            durable.finish()
            started = time.perf_counter()
            function()
            return (time.perf_counter() - started) * 1e3

        turns = {name: partial(milliseconds, function) for name, function in contenders.items()}
        writes = contest.take_turns(turns, options.repeats)
        durable.finish()
    contest.show(f"{options.megabytes} MB", "ms", writes, decimals=0)


if __name__ == "__main__":
    main()
