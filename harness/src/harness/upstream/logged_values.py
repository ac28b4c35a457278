"""Restores what is logged in the middle of an epoch, and makes its means over processes exact.

Lightning's checkpoints leave it out: after a resume an epoch's means and metrics would be those of
its later batches only, and early stopping would not know its metric. There is nothing public that
leads to the sums behind ``self.log``, or sets how often a metric was updated.

Lightning also averages the number of samples over the processes as a whole number, so that
``self.log(..., sync_dist=True)`` of 33 samples on two processes is 3 % off; and a value that is
logged without ``sync_dist`` is that of the first process alone. Seen in Lightning 2.6 and
torchmetrics 1.6 to 1.9; ``harness/tests/checkpoints`` and ``harness/tests/test_same_experiment.py``
compare the values.
"""

import builtins
import dataclasses
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.connectors.logger_connector import result
from torch import Tensor
from torchmetrics import Metric, MetricCollection

PRIVATE = {
    "trainer": "_results",
    "trainer:_logger_connector": "_callback_metrics _logged_metrics _progress_bar_metrics "
    "_first_loop_iter _current_fx epoch_end_reached",
    "torchmetrics:SumMetric()": "_update_count _computed metric_state merge_state",
    "pytorch_lightning.trainer.connectors.logger_connector.result": "_ResultMetric _Metadata _Sync",
    "harness.upstream.logged_values:example()": "is_tensor has_reset value cumulated_batch_size "
    "_update_count _forward_cache _computed _defaults",
    "harness.upstream.logged_values:example().meta": "_sync metric_attribute on_epoch reduce_fx "
    "is_max_reduction is_mean_reduction is_min_reduction is_sum_reduction fx name",
    "harness.upstream.logged_values:example().meta.sync": "should rank_zero_only op _should",
}


def example() -> Any:
    """A logged value whose attributes are looked up."""
    results = result._ResultCollection(training=True)
    results.log("training_step", "loss", torch.ones(()))
    return results["training_step.loss"]


def of_all_ranks(trainer: pl.Trainer) -> dict[str, Any]:
    """What this process knows, with all logged values; the same in every process."""
    connector = trainer._logger_connector
    return {
        "callback_metrics": copied(connector._callback_metrics),
        "logged_metrics": copied(connector._logged_metrics),
        "progress_bar_metrics": dict(connector._progress_bar_metrics),
        "should_stop": trainer.should_stop,  # by early stopping
    }


def restore_of_all_ranks(trainer: pl.Trainer, values: dict[str, Any]) -> None:
    """Put back what ``of_all_ranks`` has taken."""
    connector = trainer._logger_connector
    connector._callback_metrics.update(values["callback_metrics"])
    connector._logged_metrics.update(values["logged_metrics"])
    connector._progress_bar_metrics.update(values["progress_bar_metrics"])
    trainer.should_stop = values["should_stop"]


def of_this_rank(trainer: pl.Trainer) -> dict[str, Any]:
    """What this process has counted since the epoch's start, or since it last logged."""
    connector = trainer._logger_connector
    assert trainer._results is not None
    return {
        "metrics": {
            name: metric_counts(metric)
            for name, metric in metrics_in(trainer.lightning_module)
            if metric.update_called
        },
        "logged": {key: state_of(logged) for key, logged in trainer._results.items()},
        "first_batch": connector._first_loop_iter,
        "current_fx": connector._current_fx,
    }


def restore_of_this_rank(trainer: pl.Trainer, ranks: list[dict[str, Any]]) -> None:
    """Put back what ``of_this_rank`` has taken, at the same place of the loop.

    With another number of processes, the first one takes what all of them had counted: sums over
    processes stay what they were.
    """
    is_same_number = len(ranks) == trainer.world_size
    mine, *others = [ranks[trainer.global_rank]] if is_same_number else ranks
    takes_all = is_same_number or trainer.global_rank == 0
    connector, results = trainer._logger_connector, trainer._results
    assert results is not None
    device = trainer.strategy.root_device
    for name, metric in metrics_in(trainer.lightning_module) if takes_all else ():
        if name in mine["metrics"]:
            restore_metric(metric, mine["metrics"][name], device)
            for other in others:
                if name in other["metrics"]:
                    metric.merge_state(copied(other["metrics"][name]["state"], device))
    for key, state in mine["logged"].items():
        same = [other["logged"][key] for other in others if key in other["logged"]]
        with trainer.precision_plugin.train_step_context():  # its precision is that of the sums
            results[key] = restored(trainer, state, same, takes_all)
    connector._first_loop_iter = mine["first_batch"]
    connector._current_fx = mine["current_fx"]


def copied(value: Any, device: torch.device | str = "cpu") -> Any:
    """Copy the tensors of a tree, so that what is saved does not change any more."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: copied(item, device) for key, item in value.items()}
    return [copied(item, device) for item in value] if isinstance(value, list) else value


def metrics_in(network: Any) -> list[tuple[str, Metric]]:
    """A module's metrics by name; those of a collection brought up to date first."""
    modules = dict(network.named_modules())
    for module in modules.values():
        if isinstance(module, MetricCollection):
            module.items()  # members of a compute group share the first one's counts from now on
    return [(name, module) for name, module in modules.items() if isinstance(module, Metric)]


def metric_counts(metric: Metric) -> dict[str, Any]:
    """What a metric has counted."""
    return {"state": copied(metric.metric_state), "num_updates": metric._update_count}


def restore_metric(metric: Metric, saved: dict[str, Any], device: torch.device) -> None:
    """Let it have counted what another one had."""
    for name, value in copied(saved["state"], device).items():
        setattr(metric, name, value)
    metric._update_count = saved["num_updates"]
    metric._computed = None


class Restored(result._Metadata):
    """How a value was logged before a restart.

    Lightning compares that with how it is logged next, and takes ``sync_dist=True`` of one process
    for nothing: where their number has changed, what is logged next counts.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, result._Metadata):
            return NotImplemented
        self.sync.should = other.sync.should
        names = [field.name for field in dataclasses.fields(result._Metadata)]
        return all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = None  # type: ignore[assignment]  # as of every dataclass that is compared


def state_of(logged: Any) -> dict[str, Any]:
    """A logged value as plain data."""
    meta = logged.meta
    names = [field.name for field in dataclasses.fields(meta)]
    state: dict[str, Any] = {
        "meta": {name: getattr(meta, name) for name in names if name not in ("reduce_fx", "_sync")},
        "reduce_fx": meta.reduce_fx.__name__,
        # Lightning takes max, min and sum of Python and of torch, and compares them at every log.
        "is_builtin": getattr(builtins, meta.reduce_fx.__name__, None) is meta.reduce_fx,
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": logged.is_tensor,
        "has_reset": logged.has_reset,
        "num_updates": logged._update_count,
        "last": copied(logged._forward_cache),
        # Of harness.upstream.step_values.
        "parts": copied(getattr(logged, "parts", None)),
        "noted_size": copied(vars(logged).get("noted_size")),
    }
    if logged.is_tensor:
        state["value"] = copied(logged.value)
        state["default"] = copied(logged._defaults["value"])  # the precision of later sums
        if meta.is_mean_reduction:
            state["num_samples"] = copied(logged.cumulated_batch_size)
    return state


def restored(
    trainer: pl.Trainer, state: dict[str, Any], others: list[dict[str, Any]], takes_all: bool
) -> Any:
    """A logged value of its state, with what others have counted, or without what it has itself."""
    reduce_fx = state["reduce_fx"]
    if state["is_builtin"]:
        reduce_fx = getattr(builtins, reduce_fx)
    meta = Restored(reduce_fx=reduce_fx, **state["meta"])
    meta.sync = result._Sync(fn=trainer.strategy.reduce, **state["sync"])
    meta.sync.should &= trainer.world_size > 1
    logged = result._ResultMetric(meta, state["is_tensor"])
    if logged.is_tensor:
        value, num_samples = state["value"], state.get("num_samples")
        for other in others:
            if meta.is_max_reduction or meta.is_min_reduction:
                value = meta.reduce_fx(torch.stack([value, other["value"]]))
            elif meta.on_epoch:
                value = value + other["value"]
                num_samples = None if num_samples is None else num_samples + other["num_samples"]
        logged._defaults["value"] = state["default"]
        logged.reset()
        if takes_all:
            logged.value = value
            if num_samples is not None:
                logged.cumulated_batch_size = num_samples
    elif meta.metric_attribute is not None:
        logged.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    logged._forward_cache = state["last"]
    logged._update_count = state["num_updates"]
    logged.has_reset = state["has_reset"]
    logged.parts = state["parts"]
    if state["noted_size"] is not None:
        logged.noted_size = state["noted_size"]
    return logged.to(trainer.strategy.root_device)


def logged_means(trainer: pl.Trainer) -> list[Any]:
    """Lightning's accumulators of the plain values that the running loop has logged."""
    return [logged for logged in (trainer._results or {}).values() if logged.is_tensor]


def count_samples(trainer: pl.Trainer, num_samples: int | None) -> None:
    """Let what is logged for the running batch count as so many samples.

    Lightning takes the first tensor's dimension 0, which in a batch of graphs are the nodes.
    """
    if num_samples is not None and trainer._results is not None:
        trainer._results.batch_size = num_samples


def at_end_of_values(trainer: pl.Trainer, function: Callable[[], None]) -> None:
    """Call a function when the values of an epoch, or of a loader of an evaluation, are complete.

    That is before they are computed, and no hook is called there.
    """
    connector = trainer._logger_connector
    original = type(connector).epoch_end_reached

    def epoch_end_reached() -> None:
        function()
        original(connector)

    connector.epoch_end_reached = epoch_end_reached  # type: ignore[method-assign]


def combine(trainer: pl.Trainer, gather: Callable[[pl.Trainer, Any], list[Any]]) -> None:
    """Let each process have what all of them have logged, as one process would.

    Means, sums, largest and smallest values that are no metrics. Sums that are logged with
    ``sync_dist=True`` are added up by Lightning; means may be averaged by it again.

    Args:
        trainer: whose running loop has logged.
        gather: gives what each process has, by rank.
    """
    results = trainer._results
    if results is None:
        return
    mine = {
        key: state_of(logged)
        for key, logged in results.valid_items()
        if logged.is_tensor and logged.meta.on_epoch and logged._computed is None
        if not logged.meta.sync.rank_zero_only
        if not (logged.meta.sync.should and logged.meta.is_sum_reduction)
    }
    everyone = gather(trainer, mine)
    for key in dict.fromkeys(key for one in everyone for key in one):
        states = [one[key] for one in everyone if key in one]
        # Of a mean the processes may hold unequal numbers; a whole number is no fraction of them.
        with trainer.precision_plugin.train_step_context():  # its precision is that of the sums
            logged = results[key] = restored(trainer, states[0], states[1:], True)
        if not logged.meta.sync.should:
            logged.compute()  # now, or Lightning recommends to synchronise it


def of_hook(trainer: pl.Trainer, hook: str) -> dict[str, tuple[float, str | None]]:
    """What a hook has logged in this process, and how it was to be reduced over the processes."""
    found = {}
    for logged in (trainer._results or {}).values():
        meta = logged.meta
        if not logged.is_tensor or logged.has_reset or meta.fx != hook or meta.sync.rank_zero_only:
            continue
        value = (
            logged.value / logged.cumulated_batch_size if meta.is_mean_reduction else logged.value
        )
        found[meta.name] = (float(value), meta.sync.op if meta.sync.should else None)
    return found


def start_anew(logged: Any) -> None:
    """Forget what an accumulator has counted, and keep it in the collective operations."""
    logged.reset()
    logged.has_reset = False  # otherwise Lightning leaves it out of them
