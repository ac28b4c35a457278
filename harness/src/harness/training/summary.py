"""Print a run's start on the screen; later write and print its results.

In: the objects that ``build`` made; then the Trainer and the metrics of fit and test. Out:
results.json, and entries of record.json.
"""

import logging
import math
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from pytorch_lightning.utilities import rank_zero_only
from rich.console import Console
from rich.markup import escape
from torch.nn.parameter import UninitializedParameter

from harness import provenance
from harness.compat import find_callback
from harness.data.loaders import flat_loaders
from harness.display import display_path
from harness.distributed.should_stop import is_time_over
from harness.errors import printable
from harness.files import best_checkpoint, json_text, write_durably
from harness.monitoring.gpu_use import TIMES_LARGER, GpuUse
from harness.monitoring.throughput import Throughput

log = logging.getLogger(__name__)
NAME_WIDTH = 16
HAS_TF32 = 8  # the first compute capability of GPUs with TF32
# Rows whose text a user may copy.
COPIED = ("folder", "learning curves", "weights only", "resumes from", "predictions")
# results.json has this key if the last weights were tested: there was no best checkpoint, the best
# checkpoint was lost, or a hook set other weights in on_train_end.
LAST_WEIGHTS = "tested_last_weights"


@rank_zero_only
def show_start(cfg: DictConfig, trainer: pl.Trainer, model: pl.LightningModule) -> None:
    """Print the device, the strategy, the precision, the parameters, and the resumed checkpoint."""
    num_processes, device = trainer.world_size, trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    is_surprise = device.type == "cpu" and cfg.trainer.accelerator == "auto"
    processes = "one process" if num_processes == 1 else f"{num_processes} processes"
    parameters = [p for p in model.parameters() if not isinstance(p, UninitializedParameter)]
    num = sum(p.numel() for p in parameters)
    num_trained = sum(p.numel() for p in parameters if p.requires_grad)
    rows = {
        "device": f"{device} ({name or f'threads: {torch.get_num_threads()}'})"
        + ", no GPU found" * is_surprise,
        "strategy": f"{type(trainer.strategy).__name__}, {processes}",
        "precision": str(trainer.precision) + tf32_hint(cfg, trainer),
        "parameters": f"{num:,}" + f", of which {num_trained:,} are trained" * (num > num_trained),
    }
    if cfg.resume is not None:
        rows["resumes from"] = display_path(Path(cfg.resume).resolve())
    show(rows)


def tf32_hint(cfg: DictConfig, trainer: pl.Trainer) -> str:
    """Return a hint at ``tf32=true``, or "" if the GPU lacks TF32 or the user has decided."""
    device = trainer.strategy.root_device
    if device.type != "cuda" or trainer.precision != "32-true" or cfg.get("tf32") is not None:
        return ""
    is_set = True
    with suppress(RuntimeError):  # raised if the user has set torch's newer switch for cuBLAS alone
        is_set = torch.get_float32_matmul_precision() != "highest"
    if is_set or torch.cuda.get_device_capability(device)[0] < HAS_TF32:
        return ""
    return (
        "; tf32=true multiplies matrices on tensor cores, up to 8 times as fast, and rounds their "
        "entries to 10 bits"
    )


@rank_zero_only
def show_batch(trainer: pl.Trainer, *_: Any) -> None:
    """Print the global batch size: the samples of one optimizer step over all ranks."""
    loaders = flat_loaders(trainer.train_dataloader)
    samplers = [getattr(loader, "batch_sampler", None) for loader in loaders]
    sizes: list[Any] = [
        getattr(getattr(sampler, "batches", sampler), "batch_size", None) for sampler in samplers
    ]
    num_samples = " + ".join(str(size or "?") for size in sizes)
    num_ranks, num_micro_batches = trainer.world_size, int(trainer.accumulate_grad_batches)
    text = f"{num_samples} samples (train_dataloader)"
    if num_ranks * num_micro_batches > 1 and all(sizes):
        max_samples = sum(math.ceil(size / num_ranks / num_micro_batches) for size in sizes)
        text += f", at most {max_samples} at once"
        text += f" on each of {num_ranks} ranks" * (num_ranks > 1)
        if num_micro_batches > 1:
            text += f", with trainer.accumulate_grad_batches={num_micro_batches}"
    show({"batch": text})
    print()


@rank_zero_only
def finish(trainer: pl.Trainer, cfg: DictConfig, metrics: dict[str, float]) -> None:
    """Write a run's results, and print the result, the speed, the folder, and two commands."""
    run_dir = Path(cfg.run_dir)
    write_durably(run_dir / "results.json", json_text(metrics, indent=2).encode() + b"\n")
    entries: dict[str, Any] = {"stopped_early": early_stop_reason(trainer)}
    gpu_use: GpuUse | None = None
    if throughput := find_callback(trainer, Throughput):
        entries |= throughput.results()
        gpu_use = throughput.gpu_use
    if (best := getattr(trainer.checkpoint_callback, "best_model_score", None)) is not None:
        entries |= {"best": float(best)} if best.isfinite() else {}
    provenance.note(run_dir, **entries)
    # Test metrics belong to the best checkpoint, all others to the last epoch.
    tested = [name for name in sorted(metrics) if name.startswith("test/")]
    names = tested or [name for name in sorted(metrics) if not name.startswith("lr-")]
    results = [f"{name} {metrics[name]:.4f}" for name in names if name != LAST_WEIGHTS]
    if tested or LAST_WEIGHTS in metrics:
        which = "last" if LAST_WEIGHTS in metrics else "best"
        results.append(f"of the {which} weights")
    rows = {"result": ", ".join(results)} if results else {}
    if reason := entries["stopped_early"]:
        rows["stopped early"] = reason
    if "verdict" in entries:
        rows["speed"] = f"{entries['samples_per_second']:,.0f} samples/s, {entries['verdict']}"
    if gpu_use:
        larger = f"; a data.batch_size {TIMES_LARGER} times as large would fit"
        rows["GPU"] = f"{gpu_use}{larger * gpu_use.fits_larger_batch()}"
    rows["folder"] = display_path(run_dir)
    if (run_dir / "tensorboard").exists():
        rows["learning curves"] = f"tensorboard --logdir {quote(display_path(run_dir.parent))}"
    if checkpoint := best_checkpoint(run_dir):
        rows["weights only"] = (
            f"python scripts/convert_checkpoint.py {quote(display_path(checkpoint))}"
        )
    show(rows)


def scalar_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """Return the last value of each metric that is one number."""
    metrics = {name: torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}
    others = [name for name, value in metrics.items() if value.numel() != 1]
    if others and trainer.is_global_zero:
        log.warning(
            "results.json lacks these metrics, which have several values or none: %s.",
            ", ".join(others),
        )
    return {name: float(value) for name, value in metrics.items() if name not in others}


def show(rows: Mapping[str, str]) -> None:
    """Print a table of two columns.

    On a terminal, texts are wrapped. Commands and paths stay on one line, so that they can be
    copied.
    """
    console = Console(highlight=False)
    console.print()
    for name, value in rows.items():
        text = printable(value)
        if name not in COPIED and console.is_terminal:
            # A path inside a text stays on one line.
            options: Any = {"break_long_words": False, "break_on_hyphens": False}
            indent = " " * (NAME_WIDTH + 1)
            text = textwrap.fill(text, max(console.width - len(indent), 20), **options)
            text = text.replace("\n", "\n" + indent)
        console.print(f"[bold]{name:<{NAME_WIDTH}}[/bold] {escape(text)}", soft_wrap=True)


def early_stop_reason(trainer: pl.Trainer) -> str | None:
    """Return why a training run ended before its last epoch, or ``None`` if it is complete."""
    for stopper in trainer.early_stopping_callbacks:
        # A run that was stopped once may have been resumed to its last epoch.
        if stopper.stopping_reason_message and stopper.stopped_epoch >= trainer.current_epoch - 1:
            reason = stopper.stopping_reason_message.partition(" Signaling")[0]
            return f"in epoch {stopper.stopped_epoch}: {reason}"
    if is_time_over(trainer):
        return f"in epoch {trainer.current_epoch - 1}: trainer.max_time was over"
    num_epochs, num_steps = trainer.max_epochs or -1, trainer.max_steps
    is_done = trainer.current_epoch >= num_epochs > -1 or trainer.global_step >= num_steps > -1
    if trainer.should_stop and not is_done:
        planned = f" of {num_epochs}" if num_epochs > -1 else ""
        return f"after {trainer.current_epoch} epochs{planned}: trainer.should_stop was set"
    return None
