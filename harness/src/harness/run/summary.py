"""Show a person the start and the end of a run on the screen.

In: what ``build`` has made, or what ``finish`` has written. This is the last file of a run.
"""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_only
from rich.console import Console
from rich.markup import escape
from torch.nn.parameter import UninitializedParameter

from harness.data.batches import bounds
from harness.data.datamodule import DataModule
from harness.places import shown

# In results.json where the best checkpoint was lost: what was tested are the last weights.
LAST_WEIGHTS = "tested_last_weights"


@rank_zero_only
def show_start(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    data: pl.LightningDataModule | None,
    checkpoint: str | None = None,
    tags: Sequence[str] = (),
    notes: str | None = None,
) -> None:
    """Show what runs where, and which checkpoint it goes on from."""
    num_processes = trainer.world_size
    processes = "one process" if num_processes == 1 else f"{num_processes} processes"
    rows = {
        "device": _device_name(trainer.strategy.root_device),
        "strategy": f"{type(trainer.strategy).__name__}, {processes}",
        "precision": str(trainer.precision),
        "parameters": _num_parameters(model),
        "run folder": shown(trainer.default_root_dir),
    }
    if isinstance(data, DataModule):  # elsewhere the name may mean something else
        low, high = bounds(data.batch_size, num_processes - 1, num_processes)
        rows["batch"] = f"{data.batch_size} samples, {high - low} per process"
    if checkpoint is not None:
        rows["goes on from"] = shown(Path(checkpoint).resolve())
    if tags:
        rows["tags"] = ", ".join(map(str, tags))
    if notes is not None:
        rows["notes"] = str(notes)
    show(rows)


@rank_zero_only
def show_end(run_dir: Path, metrics: Mapping[str, float], facts: Mapping[str, Any]) -> None:
    """Show the result, what held the run back, its folder, and two commands.

    Args:
        run_dir: of the run.
        metrics: as in results.json.
        facts: as in the run's record.
    """
    # The test is of the best checkpoint; other metrics are of the last epoch.
    tested = [name for name in sorted(metrics) if name.startswith("test/")]
    names = tested or [name for name in sorted(metrics) if not name.startswith("lr-")]
    results = [f"{name} {metrics[name]:.4f}" for name in names if name != LAST_WEIGHTS]
    if LAST_WEIGHTS in metrics:
        results.append("of the last weights: the best checkpoint is lost")
    rows = {"result": ", ".join(results)} if results else {}
    if "stopped_early" in facts:
        rows["stopped early"] = facts["stopped_early"]
    if "verdict" in facts:
        rows["speed"] = f"{facts['samples_per_second']:,.0f} samples/s, {facts['verdict']}"
    rows["folder"] = shown(run_dir)
    if (run_dir / "tensorboard").exists():
        folder = quote(shown(run_dir.parent))
        rows["learning curves"] = f"{_program('tensorboard')} --logdir {folder}"
    checkpoint = run_dir / "checkpoints" / "best.ckpt"
    if checkpoint.exists():
        convert = f"{_program('python')} scripts/convert_checkpoint.py"
        rows["weights only"] = f"{convert} {quote(shown(checkpoint))}"
    show(rows)


def show(rows: Mapping[str, str]) -> None:
    """Print a table of two columns."""
    console = Console(highlight=False)
    console.print()
    for name, value in rows.items():
        # Commands and paths are there to be copied: no line breaks inside them.
        console.print(f"[bold]{name:<16}[/bold] {escape(value)}", soft_wrap=True)
    console.print()


def _num_parameters(model: pl.LightningModule) -> str:
    """How many parameters there are, and how many are trained where some are frozen."""
    if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
        return "lazy"
    num = sum(p.numel() for p in model.parameters())
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{num:,}" if num == num_trained else f"{num:,}, of which {num_trained:,} are trained"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads, {platform.machine()})"


def _program(name: str) -> str:
    """How to call a program of this environment: by its path where it is not activated."""
    if "VIRTUAL_ENV" in os.environ or sys.prefix == sys.base_prefix:
        return name
    return shown(Path(sys.executable).with_name(name))
