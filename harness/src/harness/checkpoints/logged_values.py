"""Keeps what is logged in the middle of an epoch, with a checkpoint.

Lightning's checkpoints leave it out: after a resume an epoch's means and metrics would be those of
its later batches only, and early stopping would not know its metric.
"""

import logging
from typing import Any

import pytorch_lightning as pl
from torchmetrics.wrappers import MetricTracker, Running

from harness.compat import callbacks_of
from harness.compat.logged_values import (
    detached_copy,
    in_hook,
    metric_counts,
    named_metrics,
    restore_metric,
)
from harness.display import join_first
from harness.parity.self_log import LoggedMetric, SelfLog

log = logging.getLogger(__name__)
VALUES = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def shared_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the values that callbacks and loggers read; they are the same in every process."""
    values = {name: detached_copy(getattr(trainer, name)) for name in VALUES}
    return values | {"should_stop": trainer.should_stop}  # by early stopping


def restore_shared_state(trainer: pl.Trainer, values: dict[str, Any]) -> None:
    """Put back what ``shared_state`` has taken."""
    for name in VALUES:
        getattr(trainer, name).update(detached_copy(values[name]))
    trainer.should_stop = values["should_stop"]


def rank_state(trainer: pl.Trainer, is_end: bool) -> dict[str, Any]:
    """Return what this process has accumulated since the epoch's start, or since it last logged.

    At the end of the training that is what metrics have counted which no epoch resets.
    """
    module, logs = trainer.lightning_module, log_of(trainer)
    metrics = {
        name: metric
        for name, metric in named_metrics(module).items()
        if metric.update_called or isinstance(metric, Running)  # which counts without an update
    }
    paths = {id(metric): name for name, metric in metrics.items()}
    logged = {}
    for key, one in logs.logged.items() if not is_end else ():
        if isinstance(one, LoggedMetric):
            # What an epoch's end has logged is of the epoch before.
            if id(one.metric) in paths and not one.how["fx"].endswith("epoch_end"):
                logged[key] = one.how | {"path": paths[id(one.metric)]}
        elif one.is_logged:
            logged[key] = detached_copy(one.state()) | {"dtype": one.zero.dtype}
    return {
        "metrics": {name: metric_counts(metric) for name, metric in metrics.items()},
        "num_tracked": {name: tracker.n_steps for name, tracker in trackers_in(module).items()},
        "logged": logged,
    }


def restore_rank_states(trainer: pl.Trainer, ranks: list[dict[str, Any]]) -> None:
    """Put back what ``rank_state`` has taken, at the same place of the loop.

    With another number of processes, the first one takes what all of them had counted: sums over
    processes stay what they were.
    """
    logs, module, device = log_of(trainer), trainer.lightning_module, trainer.strategy.root_device
    is_same_number = len(ranks) == trainer.world_size
    mine, *others = [ranks[trainer.global_rank]] if is_same_number else ranks
    takes_all = is_same_number or trainer.global_rank == 0
    for name, tracker in trackers_in(module).items():
        while tracker.n_steps < mine.get("num_tracked", {}).get(name, 0):
            tracker.increment()
    lost: set[str] = set()  # metrics that torchmetrics cannot merge
    for name, metric in named_metrics(module).items() if takes_all else ():
        if name in mine["metrics"]:
            restore_metric(metric, mine["metrics"][name], device)
            for other in others:
                try:
                    if name in other["metrics"]:
                        metric.merge_state(detached_copy(other["metrics"][name]["state"], device))
                except RuntimeError:
                    lost.add(name)
    if lost:
        log.warning(
            "What %d processes had counted in this epoch cannot be merged, and process 0's goes on "
            "alone: %s. full_state_update = False in the metric's class lets it.",
            *(len(ranks), join_first(sorted(lost))),
        )
    for key in dict.fromkeys(key for rank in (mine, *others) for key in rank["logged"]):
        states = [rank["logged"][key] for rank in (mine, *others) if key in rank["logged"]]
        if "path" in (how := states[0]):
            own = module.get_submodule(how.pop("path"))
            with in_hook(module, how.pop("fx")):
                logs(value=own, **how)
            continue
        logged = logs.new_value(key, how["how"])
        logged.zero = logged.zero.to(how["dtype"])  # of the hook's precision, not of this moment's
        logged.reset()
        logged.restore(detached_copy(states, device), takes_all)
        logs.hand_over(logged)


def trackers_in(module: pl.LightningModule) -> dict[str, MetricTracker]:
    """Return the trackers of a module, which have a metric for each of their steps."""
    return {name: part for name, part in module.named_modules() if isinstance(part, MetricTracker)}


def log_of(trainer: pl.Trainer) -> SelfLog:
    """Return the ``SelfLog`` of a run."""
    found = (getattr(callback, "self_log", None) for callback in callbacks_of(trainer))
    return next(one for one in found if isinstance(one, SelfLog))
