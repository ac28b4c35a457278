"""A run that logs as Lightning does, is killed, and goes on, without training."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.loggers.metrics_table import MetricsTable
from harness.loggers.rewind import EMPTY, Logs
from harness.loggers.tensorboard import TensorBoard

END = 60  # steps


def attempt(run_dir: Path, last: int, record: Any = EMPTY, first: int = 0) -> Any:
    """One process: goes on from a record, logs the steps up to ``last``, and returns a record.

    Unless it ends the run, it logs ten more steps, as a process that is killed does.
    """
    logs = Logs(run_dir)
    loggers = [MetricsTable(run_dir / "metrics.csv"), TensorBoard(run_dir, "", "tensorboard")]
    loggers[1].experiment.flush()  # opens its file
    logs.rewind(record)
    for step in range(first, min(last + 10, END)):
        if step == last:
            record = recorded(logs, loggers)
        for logger in loggers:
            log_step(logger, step)
    if last == END:
        record = recorded(logs, loggers)
    for logger in loggers:
        logger.finalize("success")
    return record


def recorded(logs: Logs, loggers: list[Any]) -> Any:
    for logger in loggers:
        logger.write_all()
    return logs.record()


def log_step(logger: Any, step: int) -> None:
    logger.log_metrics({"lr": 0.001 * (1 + step // 20)}, step)
    logger.log_metrics({"train/loss": math.exp(-step / 7), "epoch": step // 10}, step)
    if step % 10 == 9:
        accuracy = step / 61 if step < 50 else math.nan
        logger.log_metrics({"val/accuracy": accuracy}, step)
    if step == 45:  # a column that only a killed process may have
        logger.log_metrics({"late": 1.0}, step)
    if isinstance(logger, TensorBoard):
        logger.experiment.add_histogram("weights", np.arange(step + 1), step)
        logger.experiment.add_scalar("by_sample", 0.5, step * 64)  # steps of another kind
        logger.experiment.add_scalars("pair", {"left": 0.5}, step)  # a file in a folder below


def curves(run_dir: Path) -> dict[str, list[tuple[int, str]]]:
    """What TensorBoard shows, by its own reader; files of one second are in no order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for folder in [run_dir / "tensorboard", *run_dir.glob("tensorboard/*/")]:
        reader = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0})
        reader.Reload()
        for tag in reader.Tags()["scalars"]:
            points = [(event.step, str(event.value)) for event in reader.Scalars(tag)]
            found[f"{folder.name}/{tag}"] = sorted(points)
        for tag in reader.Tags()["histograms"]:
            found[tag] = sorted((event.step, "") for event in reader.Histograms(tag))
    return found
