"""What a person reads on the screen at the start and at the end of a run."""

import logging
import os
import platform
import sys
from collections.abc import Sequence
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
from harness.init.weights import Started
from harness.places import shown

log = logging.getLogger(__name__)
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
    """Say what runs where, and which checkpoint it goes on from."""
    is_known = not any(isinstance(p, UninitializedParameter) for p in model.parameters())
    num_processes = trainer.world_size
    processes = "one process" if num_processes == 1 else f"{num_processes} processes"
    rows = {
        "device": _device_name(trainer.strategy.root_device),
        "strategy": f"{type(trainer.strategy).__name__}, {processes}",
        "precision": str(trainer.precision),
        "parameters": _num_parameters(model) if is_known else "lazy",
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
    _print_table(rows)


@rank_zero_only
def show_end(
    run_dir: Path,
    metrics: dict[str, float],
    seen: dict[str, Any],
    has_test: bool = True,
) -> None:
    """Say what came out, where it is, and what to type next."""
    # The test is of the best checkpoint; other metrics are of the last epoch.
    tested = [name for name in sorted(metrics) if name.startswith("test/")]
    names = tested or [name for name in sorted(metrics) if not name.startswith("lr-")]
    rows = {name: f"{metrics[name]:.4f}" for name in names}
    if LAST_WEIGHTS in metrics:
        rows["of"] = "the last weights: the best checkpoint is lost"
    if "stopped_early" in seen:
        rows["stopped early"] = seen["stopped_early"]
    if "verdict" in seen:
        rows["speed"] = f"{seen['samples_per_second']:,.0f} samples/s, {seen['verdict']}"
        rows["memory"] = f"{seen['peak_mib']:,} MiB at most in the first process"
    rows["results"] = shown(run_dir / "results.json")
    if (run_dir / "tensorboard").exists():
        rows["learning curves"] = (
            f"{_program('tensorboard')} --logdir {quote(shown(run_dir.parent))}"
        )
    checkpoint = run_dir / "checkpoints" / "best.ckpt"
    if checkpoint.exists():
        rows["best checkpoint"] = shown(checkpoint)
        if has_test:
            rows["test again"] = (
                f"{_program('python')} evaluate.py checkpoint={quote(shown(checkpoint))}"
            )
        convert = f"{_program('python')} scripts/convert_checkpoint.py"
        rows["weights only"] = f"{convert} {quote(shown(checkpoint))}"
    _print_table(rows)


def show_weights(started: Started) -> None:
    """Say which weights a run starts from, and what of them fits; the log file has all names."""
    _print_table(started.rows)
    log.info("\n".join(started.lines))


def show_predictions(path: Path) -> None:
    """Say where the predictions are."""
    _print_table({"predictions": shown(path)})


def _print_table(rows: dict[str, str]) -> None:
    console = Console(highlight=False)
    console.print()
    for name, value in rows.items():
        # Commands and paths are there to be copied: no line breaks inside them.
        console.print(f"[bold]{name:<16}[/bold] {escape(value)}", soft_wrap=True)
    console.print()


def _num_parameters(model: pl.LightningModule) -> str:
    """How many there are, and how many of them are trained where some are frozen."""
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
