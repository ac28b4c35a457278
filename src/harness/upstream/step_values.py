"""Makes what training steps log that of all their samples, where it reaches the loggers.

With several processes Lightning's row has the value of the first one's share of the batch, and with
accumulated gradients that of the batch's last part. Here a row has the mean over the samples of
all of them, or their sum, largest or smallest value, as ``self.log`` was told by ``reduce_fx``.
Processes ask each other where a row is due, and at an epoch's last batch, whose values schedulers,
best checkpoints and early stopping read.

Seen in Lightning 2.6. ``tests_harness/exact/test_step_values.py`` compares the rows.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch

PRIVATE = {
    "trainer": "_results",
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


def combine_steps(
    trainer: pl.Trainer,
    gather: Callable[[Any], list[Any]],
    num_samples: Callable[[], int | None],
) -> None:
    """Let the training that begins log the values of whole batches.

    Args:
        trainer: whose loop logs.
        gather: gives what each process has, by rank.
        num_samples: of the running batch in this process; none where it only takes part.
    """
    connector = trainer._logger_connector
    original = type(connector).on_batch_end
    told: set[str] = set()

    def on_batch_end() -> None:
        if trainer.training and trainer.world_size * int(trainer.accumulate_grad_batches) > 1:
            note(trainer, num_samples(), told)
            if is_read(trainer):
                combine(trainer, gather)
        original(connector)

    connector.on_batch_end = on_batch_end  # type: ignore[method-assign]


def note(trainer: pl.Trainer, num_samples: int | None, told: set[str]) -> None:
    """Keep what this batch has logged, until the step's other parts are known."""
    results, step = trainer._results, trainer.fit_loop.epoch_loop._batches_that_stepped
    assert results is not None
    for logged in results.values():
        meta, last = logged.meta, getattr(logged, "parts", None)
        num_updates = logged._update_count
        if not meta.on_step or meta.sync.rank_zero_only or logged.has_reset:
            continue
        if not logged.is_tensor:
            is_own = trainer.is_global_zero and not logged.value.dist_sync_on_step
            if is_own and meta.name not in told:
                told.add(meta.name)
                log.warning(
                    "%s, a metric, is logged at steps: there it counts a part of the batch alone, "
                    "one process's and the last that is accumulated. Over an epoch it counts all.",
                    meta.name,
                )
        elif last is None or last["num_updates"] != num_updates:
            of = last["of"] if last is not None and last["step"] == step else []
            part = [1 if num_samples is None else num_samples, logged._forward_cache]
            logged.parts = {"step": step, "num_updates": num_updates, "of": [*of, part]}


def is_read(trainer: pl.Trainer) -> bool:
    """Whether somebody is to read what the step has logged; the same in every process."""
    if trainer.fit_loop._should_accumulate():
        return False
    plateau = any(
        config.reduce_on_plateau and config.interval == "step"
        for config in trainer.lr_scheduler_configs
    )
    return plateau or trainer.is_last_batch or trainer._logger_connector.should_update_logs


def combine(trainer: pl.Trainer, gather: Callable[[Any], list[Any]]) -> None:
    """Put the values of whole batches where the loggers read them."""
    noted = {
        key: logged
        for key, logged in (trainer._results or {}).items()
        if (getattr(logged, "parts", None) or {}).get("of")
    }
    device = trainer.strategy.root_device
    values = [v.reshape(()).to(device) for one in noted.values() for _, v in one.parts["of"]]
    numbers = iter(torch.stack(values).tolist() if values else [])  # waits for the device once
    mine = {
        key: (logged.parts["step"], [(size, next(numbers)) for size, _ in logged.parts["of"]])
        for key, logged in noted.items()
    }
    everyone = gather(mine)
    for key, logged in noted.items():
        found = [one[key] for one in everyone if key in one]
        latest = max(step for step, _ in found)
        by_rank = [parts for step, parts in found if step == latest]
        if logged.meta.sync.should:  # the processes have one value already
            sizes = [sum(size for size, _ in parts) for parts in zip(*by_rank, strict=False)]
            by_rank = [[(n, value) for n, (_, value) in zip(sizes, mine[key][1], strict=False)]]
        value = whole([part for parts in by_rank for part in parts], logged)
        logged.parts["of"] = []
        if value is not None:
            logged._forward_cache = torch.full_like(logged._forward_cache, value)
            if not logged.meta.on_epoch:
                logged.value = logged._forward_cache


def whole(parts: list[tuple[int, float]], logged: Any) -> float | None:
    """The value of a batch of which these are parts, with their numbers of samples.

    Returns:
        ``None`` where it is that of each part.
    """
    parts = [part for part in parts if part[0]] or [(1, value) for _, value in parts]  # no fillers
    values = [value for _, value in parts]
    if logged.meta.is_sum_reduction:
        return sum(values)
    if logged.meta.is_max_reduction:
        return max(values)
    if logged.meta.is_min_reduction:
        return min(values)
    if not logged.meta.is_mean_reduction or all(value == values[0] for value in values):
        return None
    return sum(n * value for n, value in parts) / sum(n for n, _ in parts)
