"""A run that logs as Lightning does and is killed and goes on, without training."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.loggers import metrics_table
from harness.loggers.metrics_table import MetricsTable
from harness.loggers.rewind import Logs
from harness.loggers.tensorboard import TensorBoard

END = 60  # steps


def attempt(
    run_dir: Path,
    last: int,
    record: Any = None,
    first: int = 0,
    *,
    csv: bool = True,
    tb: bool = True,
) -> Any:
    """One process: goes on from a record, logs the steps up to ``last``, and returns a record.

    It writes ten more steps after its last checkpoint, as a process that is killed does, unless
    it ends the run.
    """
    logs = Logs(run_dir)
    table, board = MetricsTable(run_dir / "metrics.csv"), TensorBoard(run_dir, "", "tensorboard")
    if tb:
        board.experiment.flush()
    if record is not None:
        logs.rewind(record, first)
    logs.begin([table])
    loggers = [*[table] * csv, *[board] * tb]
    log_steps(range(first, last), loggers, board if tb else None)
    for logger in loggers:
        logger.write_all()
    record = logs.record()
    record = torch.load(saved(record, run_dir), weights_only=True)  # as a checkpoint keeps it
    if last < END:
        log_steps(range(last, last + 10), loggers, board if tb else None)
        for logger in loggers:
            logger.write_all()
    if tb:
        board.experiment.close()
    return record


def saved(record: Any, run_dir: Path) -> Path:
    torch.save(record, run_dir / "record.pt")
    return run_dir / "record.pt"


def log_steps(steps: Iterable[int], loggers: list[Any], board: TensorBoard | None) -> None:
    for step in steps:
        epoch = step // 10
        values: list[dict[str, float]] = [{"lr": 0.001 * (1 + step // 20)}]
        loss = torch.tensor(math.exp(-step / 7)).item()
        values.append({"train/loss": loss, "epoch": epoch})
        if step % 10 == 9:
            accuracy = torch.tensor(step / 61).item() if step < 50 else math.nan
            values.append({"val/accuracy": accuracy, "epoch": epoch})
        for logger in loggers:
            for metrics in values:
                logger.log_metrics(metrics, step)
        if board is not None and step % 10 == 9:
            board.experiment.add_histogram("weights", np.arange(step), step)
            board.experiment.add_scalar("throughput/samples", 3.0, step)


def table_of(run_dir: Path) -> list[dict[str, float]]:
    """The rows of the table, with what NaN equals."""
    rows = metrics_table.read(run_dir / "metrics.csv")
    return [{k: "nan" if v != v else v for k, v in row.items()} for row in rows]  # type: ignore[misc]


def curves(run_dir: Path) -> dict[str, list[tuple[int, str]]]:
    """What TensorBoard shows, by its own reader."""
    all_of_them = {"scalars": 0, "histograms": 0}
    reader = EventAccumulator(str(run_dir / "tensorboard"), size_guidance=all_of_them)
    reader.Reload()
    found: dict[str, list[tuple[int, str]]] = {
        tag: [(e.step, str(e.value)) for e in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }
    histograms = reader.Tags()["histograms"]
    return found | {tag: [(e.step, "") for e in reader.Histograms(tag)] for tag in histograms}
