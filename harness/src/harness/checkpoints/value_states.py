"""Save logged values and metrics in a checkpoint inside an epoch, and restore them.

Lightning's checkpoints lack these. Without them, a resumed run would compute the epoch's means and
metrics from its later batches only, and early stopping would miss its metric.
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
    """Return the values that callbacks and loggers read, which are equal on all ranks."""
    values = {name: detached_copy(getattr(trainer, name)) for name in VALUES}
    return values | {"should_stop": trainer.should_stop}


def restore_shared_state(trainer: pl.Trainer, values: dict[str, Any]) -> None:
    """Restore the values that ``shared_state`` returned."""
    for name in VALUES:
        getattr(trainer, name).update(detached_copy(values[name]))
    trainer.should_stop = values["should_stop"]


def rank_state(trainer: pl.Trainer, is_end: bool) -> dict[str, Any]:
    """Return the counts of this rank's metrics, and its logged values of the running epoch.

    With ``is_end``, at the end of the training, it returns the metrics' counts alone.
    """
    module, logs = trainer.lightning_module, self_log_of(trainer)
    metrics = {
        name: metric
        for name, metric in named_metrics(module).items()
        if metric.update_called or isinstance(metric, Running)  # its forward skips ``update``
    }
    paths = {id(metric): name for name, metric in metrics.items()}
    logged = {}
    for key, value in logs.logged.items() if not is_end else ():
        if isinstance(value, LoggedMetric):
            # A metric that was logged in an epoch_end hook belongs to the epoch before.
            if id(value.metric) in paths and not value.how["fx"].endswith("epoch_end"):
                logged[key] = value.how | {"path": paths[id(value.metric)]}
        elif value.is_logged:
            logged[key] = detached_copy(value.state()) | {"dtype": value.zero.dtype}
    return {
        "metrics": {name: metric_counts(metric) for name, metric in metrics.items()},
        "num_tracked": {name: tracker.n_steps for name, tracker in trackers_in(module).items()},
        "logged": logged,
    }


def restore_rank_states(trainer: pl.Trainer, ranks: list[dict[str, Any]]) -> None:
    """Restore the states of ``rank_state`` from all ranks, at the batch at which they were saved.

    If the number of ranks has changed, rank 0 gets the merged counts of all ranks, so that sums
    over ranks stay equal.
    """
    logs, module, device = (
        self_log_of(trainer),
        trainer.lightning_module,
        trainer.strategy.root_device,
    )
    is_same_number = len(ranks) == trainer.world_size
    first, *others = [ranks[trainer.global_rank]] if is_same_number else ranks
    has_counts = is_same_number or trainer.global_rank == 0
    for name, tracker in trackers_in(module).items():
        while tracker.n_steps < first.get("num_tracked", {}).get(name, 0):
            tracker.increment()
    lost: set[str] = set()  # metrics that torchmetrics cannot merge
    for name, metric in named_metrics(module).items() if has_counts else ():
        if name in first["metrics"]:
            restore_metric(metric, first["metrics"][name], device)
            for other in others:
                try:
                    if name in other["metrics"]:
                        metric.merge_state(detached_copy(other["metrics"][name]["state"], device))
                except RuntimeError:
                    lost.add(name)
    if lost:
        log.warning(
            "Metrics of %d ranks cannot be merged, so only rank 0's counts continue: %s.\n"
            "Set full_state_update = False in the metric's class.",
            *(len(ranks), join_first(sorted(lost))),
        )
    for key in dict.fromkeys(key for rank in (first, *others) for key in rank["logged"]):
        states = [rank["logged"][key] for rank in (first, *others) if key in rank["logged"]]
        if "path" in (how := states[0]):
            own = module.get_submodule(how.pop("path"))
            with in_hook(module, how.pop("fx")):
                logs(value=own, **how)
            continue
        logged = logs.new_value(key, how["how"])
        logged.zero = logged.zero.to(how["dtype"])  # the dtype in the hook that logged it
        logged.reset()
        logged.restore(detached_copy(states, device), has_counts)
        logs.pass_to_lightning(logged)


def trackers_in(module: pl.LightningModule) -> dict[str, MetricTracker]:
    """Return the ``MetricTracker`` modules by name; each holds one metric per step."""
    return {name: part for name, part in module.named_modules() if isinstance(part, MetricTracker)}


def self_log_of(trainer: pl.Trainer) -> SelfLog:
    """Return the ``SelfLog`` of a run."""
    found = (getattr(callback, "self_log", None) for callback in callbacks_of(trainer))
    return next(self_log for self_log in found if isinstance(self_log, SelfLog))
