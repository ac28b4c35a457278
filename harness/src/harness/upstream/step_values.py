"""Makes what training steps log that of all their samples, where it reaches the loggers.

With several processes Lightning's row has the value of the first one's share of the batch, and with
accumulated gradients that of the batch's last part. Here a row has the mean over the samples of
all of them, or over the ``batch_size`` that ``self.log`` was given, or their sum, largest or
smallest value, as ``reduce_fx`` says. Processes ask each other where a row is due, and at an
epoch's last batch, whose values schedulers, best checkpoints and early stopping read.

Seen in Lightning 2.6. ``harness/tests/exact/test_step_values.py`` compares the rows.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch

from harness.upstream import logged_values

PRIVATE = {
    "trainer": "_results",
    "trainer:fit_loop.epoch_loop._results": "_extract_batch_size",
    "trainer:_logger_connector": "on_batch_end should_update_logs",
    "trainer:fit_loop": "_should_accumulate",
    "trainer:fit_loop.epoch_loop": "_batches_that_stepped",
    "harness.upstream.logged_values:example()": "is_tensor has_reset value _update_count "
    "_forward_cache",
    "harness.upstream.logged_values:example().meta": "on_step on_epoch name is_max_reduction "
    "is_mean_reduction is_min_reduction is_sum_reduction sync",
    "harness.upstream.logged_values:example().meta.sync": "should rank_zero_only",
}
log = logging.getLogger(__name__)


def note_sizes(
    trainer: pl.Trainer, num_samples: Callable[[], int | None], weigh: Callable[[Any], None]
) -> None:
    """Let the training that begins know how much each value counts that its steps log.

    Args:
        trainer: whose loop logs.
        num_samples: of the running batch in this process; none where it only takes part.
        weigh: is told the ``batch_size`` that is logged with what is synchronised next.
    """
    results = trainer._results
    assert results is not None
    original = type(results)._extract_batch_size

    def extract_batch_size(logged: Any, given: Any, meta: Any) -> Any:
        size = num_samples()
        if given is not None and size != 0:
            size = given
        vars(logged)["noted_size"] = 1 if size is None else size  # sooner than a module's attribute
        if given is not None and meta.sync.should:
            weigh(size)
        return original(results, logged, given, meta)

    vars(results)["_extract_batch_size"] = extract_batch_size


def end_batch(
    trainer: pl.Trainer, gather: Callable[[pl.Trainer, Any], list[Any]], told: set[str]
) -> None:
    """After a training batch: let a row that is due have the values of the whole batch.

    Args:
        trainer: whose loop has logged.
        gather: gives what each process has, by rank.
        told: names of metrics that a warning has named.
    """
    if trainer.world_size * int(trainer.accumulate_grad_batches) > 1:
        note(trainer, told)
        if is_read(trainer):
            combine(trainer, gather)


def at_end_of_batch(trainer: pl.Trainer, function: Callable[[], None]) -> None:
    """Call a function after a batch and all its hooks, before what it has logged is read."""
    connector = trainer._logger_connector
    original = type(connector).on_batch_end

    def on_batch_end() -> None:
        function()
        original(connector)

    connector.on_batch_end = on_batch_end  # type: ignore[method-assign]


def note(trainer: pl.Trainer, told: set[str]) -> None:
    """Keep what this batch has logged, until the step's other parts are known."""
    results, step = trainer._results, trainer.fit_loop.epoch_loop._batches_that_stepped
    assert results is not None
    for logged in results.values():
        meta, size = logged.meta, vars(logged).pop("noted_size", None)
        if size is None or not meta.on_step or meta.sync.rank_zero_only or logged.has_reset:
            continue
        if logged.is_tensor:
            last = getattr(logged, "parts", None)
            of = last["of"] if last is not None and last["step"] == step else []
            logged.parts = {"step": step, "of": [*of, [size, logged._forward_cache]]}
        elif meta.name not in told and not logged.value.dist_sync_on_step:
            told.add(meta.name)
            if trainer.is_global_zero:
                log.warning(
                    "%s, a metric, is logged at steps: there it counts a part of the batch alone, "
                    "one process's and the last that is accumulated. Over an epoch it counts all.",
                    meta.name,
                )


def is_read(trainer: pl.Trainer) -> bool:
    """Whether somebody is to read what the step has logged; the same in every process."""
    if trainer.fit_loop._should_accumulate():
        return False
    plateau = any(
        config.reduce_on_plateau and config.interval == "step"
        for config in trainer.lr_scheduler_configs
    )
    return plateau or trainer.is_last_batch or trainer._logger_connector.should_update_logs


def combine(trainer: pl.Trainer, gather: Callable[[pl.Trainer, Any], list[Any]]) -> None:
    """Put the values of whole batches where the loggers read them."""
    results = trainer._results
    assert results is not None
    noted = {
        key: getattr(logged, "parts", None) or {"step": -1, "of": []}
        for key, logged in results.items()
        if logged.is_tensor and logged.meta.on_step and not logged.meta.sync.rank_zero_only
    }
    device = trainer.strategy.root_device
    values = [v.reshape(()).to(device) for parts in noted.values() for _, v in parts["of"]]
    numbers = iter(torch.stack(values).tolist() if values else [])  # waits for the device once
    mine = {
        key: (parts["step"], [(float(size), next(numbers)) for size, _ in parts["of"]])
        for key, parts in noted.items()
    }
    everyone = gather(trainer, mine)
    keys = dict.fromkeys(key for one in everyone for key in one)
    if lacking := [key for key in keys if any(key not in one for one in everyone)]:
        known = {key: logged_values.state_of(results[key]) for key in lacking if key in results}
        states = gather(trainer, known)
        for key in lacking:
            if key not in results:
                state = next(one[key] for one in states if key in one)
                results[key] = logged_values.restored(trainer, state, [], takes_all=False)
    for key in keys:
        logged, found = results[key], [one[key] for one in everyone if key in one]
        latest = max(step for step, _ in found)
        by_rank = [parts for step, parts in found if step == latest and parts]
        logged.parts = {"step": latest, "of": []}
        if not by_rank:  # nobody has logged it since the last row
            continue
        if logged.meta.sync.should:  # the processes have one value already
            sizes = [sum(size for size, _ in parts) for parts in zip(*by_rank, strict=False)]
            by_rank = [[(n, v) for n, (_, v) in zip(sizes, by_rank[0], strict=False)]]
        value = whole([part for parts in by_rank for part in parts], logged)
        if logged.has_reset:  # in this epoch other processes alone have logged it
            logged.has_reset, logged._update_count = False, 1
            logged._forward_cache = logged.value
        logged._forward_cache = torch.full_like(logged._forward_cache, value)
        if not logged.meta.on_epoch:
            logged.value = logged._forward_cache


def whole(parts: list[tuple[float, float]], logged: Any) -> float:
    """The value of a batch of which these are parts, with their numbers of samples."""
    parts = [part for part in parts if part[0]] or [(1, value) for _, value in parts]  # no fillers
    values = [value for _, value in parts]
    if logged.meta.is_sum_reduction:
        return sum(values)
    if logged.meta.is_max_reduction or logged.meta.is_min_reduction:
        largest = logged.meta.is_max_reduction
        return math.nan if any(map(math.isnan, values)) else (max if largest else min)(values)
    if not logged.meta.is_mean_reduction or all(value == values[0] for value in values):
        return values[0]
    return sum(n * value for n, value in parts) / sum(n for n, _ in parts)
