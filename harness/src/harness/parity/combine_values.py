"""The callback that combines logged values, metrics and lists over the ranks.

``compat/final_values.py`` decides when values are final, and then calls this callback. ``SelfLog``
combines the logged values, and ``Gathering`` gathers the lists of the module:

- At the start of a batch, both learn how many of its samples this rank computes.
- At the end of a training step, ``SelfLog`` combines the step's values if a logger or a scheduler
  reads them at this step. After other steps, ``callback_metrics`` has this rank's values.
- At the end of a loader or training epoch all values are combined, before Lightning and the
  module's own epoch-end hook read them.
- The values that this epoch-end hook logs must be equal on all ranks. Otherwise an evaluation
  stops with an error, and a training run logs a warning.
"""

import logging
from functools import reduce
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from harness.compat.logged_values import (
    LoggedValue,
    Pair,
    metric_counts,
    named_metrics,
    reduced,
    restore_metric,
)
from harness.data.batches import Batch
from harness.data.loaders import flat_loaders
from harness.distributed.gather import gather
from harness.errors import UserError
from harness.parity.gathering import Gathering
from harness.parity.global_batches import BatchSplitter, check_same_batches, splitter_of
from harness.strategies.sync_batch_norm import SyncBatchNorm

log = logging.getLogger(__name__)


class RankCombiner(pl.Callback):
    """Give the ranks, in training and evaluation, the values that a single process would log."""

    def __init__(self) -> None:
        self.self_log: Any = None  # a SelfLog, from ``attachments`` in each stage
        self.gathering: Gathering | None = None  # None with one rank
        self.counts_before_padding: list[tuple[Metric, dict[str, Any]]] = []
        self.warned: set[str] = set()

    def on_train_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note how many samples this rank computes; before padding, save the metrics' states."""
        splitter = running_batches(trainer, dataloader_idx)
        num_samples = None if splitter is None else splitter.num_samples_in(batch_idx)
        SyncBatchNorm.is_padding = splitter is not None and splitter.is_padding(batch_idx)
        if SyncBatchNorm.is_padding:
            num_samples = 0
            self.counts_before_padding = [
                (metric, metric_counts(metric)) for metric in metrics_of(pl_module)
            ]
        self.self_log.begin_batch(batch, num_samples, batch_idx, dataloader_idx)
        if self.gathering is not None:
            self.gathering.begin_batch(splitter, batch_idx, dataloader_idx)

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    def on_predict_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Replace each ``Batch`` of indices by a list.

        Prediction writers iterate over the indices, and iterating over a ``Batch`` would seed the
        generators.
        """
        loop = trainer.predict_loop
        if isinstance(loop.current_batch_indices, Batch):
            loop.current_batch_indices = loop.current_batch_indices[:]
        for batches in loop.epoch_batch_indices:
            batches[-1:] = [batch[:] for batch in batches[-1:]]

    def end_batch(self, trainer: pl.Trainer) -> None:
        """Restore metrics that have counted padding, and combine the values that are read now."""
        for metric, counts in self.counts_before_padding:
            restore_metric(metric, counts, trainer.strategy.root_device)
        self.counts_before_padding, SyncBatchNorm.is_padding = [], False
        self.self_log.end_batch()
        if self.gathering is not None:
            self.gathering.end_batch()

    def end_loader(self, trainer: pl.Trainer) -> None:
        """Combine the values that the steps of a loader, or of a training epoch, have logged."""
        self.self_log.combine()
        if trainer.world_size > 1:
            pad_metric_lists(trainer, metrics_of(trainer.lightning_module))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the lists that the steps have filled, before the module's own hook reads them."""
        if self.gathering is not None:
            by_loader = map(splitter_of, flat_loaders(evaluated_loaders(trainer)))
            check_same_batches(trainer, [found for found in by_loader if found is not None])
            self.gathering.gather_lists()

    on_test_epoch_end = on_validation_epoch_end

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Combine the values that hooks at the end of an epoch have logged."""
        for logged, by_rank in self.self_log.of_all_processes():
            self._set_final_value(trainer, logged, by_rank)
        if self.gathering is not None:
            self.gathering.skips_all_gather = False

    def _set_final_value(
        self, trainer: pl.Trainer, logged: LoggedValue, by_rank: list[Pair | None]
    ) -> None:
        """Set the value that an epoch-end hook has logged; report a value that differs by rank.

        ``by_rank`` has the total and weight of each rank, or None for a rank that logged nothing.
        """
        name, hook, op = (logged.how[key] for key in ("name", "fx", "reduce_fx"))
        pairs = [pair for pair in by_rank if pair]
        is_everywhere = len(pairs) == len(by_rank)
        if logged.how.get("sync_dist") and op != "mean" and is_everywhere:
            assert self.gathering is not None
            if op == "sum" and self.gathering.skips_all_gather:
                raise UserError(
                    f"{hook} logs {name} with sync_dist=True, which sums the value over the "
                    "processes. But the module's lists already hold the values of all "
                    "processes.\nRemove sync_dist=True, or log the value in the step."
                )
            logged.complete_epoch(pairs)
            return
        logged.complete_epoch(pairs[:1])
        numbers = [reduced(op, *pair) for pair in pairs]
        if is_everywhere and np.allclose(numbers, numbers[0], rtol=1e-6, atol=0, equal_nan=True):
            return
        values = ", ".join(f"{reduced(op, *pair):.6g}" if pair else "none" for pair in by_rank)
        problem = f"{name}, logged in {hook}, differs between ranks ({values})"
        rank_zero = (
            "To log rank 0's value only, such as a time, use self.log(..., rank_zero_only=True)."
        )
        if not trainer.training:
            raise UserError(
                f"{problem}: each rank has counted its own samples.\nLog the value in the step, "
                "log a torchmetrics metric, or append the data for the value to a list of the "
                f"module, such as self.outputs. The run gathers such lists. {rank_zero}"
            )
        if name not in self.warned and trainer.is_global_zero:
            log.warning(
                "%s. The log has rank 0's value.\nLog the value in the step. %s", problem, rank_zero
            )
        self.warned.add(name)


def evaluated_loaders(trainer: pl.Trainer) -> Any:
    """Return the loaders of the running validation or test."""
    return trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders


def running_batches(trainer: pl.Trainer, dataloader_idx: int = 0) -> BatchSplitter | None:
    """Return the sampler or stream that splits the running loader's batches over the ranks."""
    loaders = evaluated_loaders(trainer) if trainer.evaluating else trainer.train_dataloader
    if (only := splitter_of(loaders)) is not None:  # the usual case, without a search
        return only
    singles = flat_loaders(loaders)
    return splitter_of(singles[dataloader_idx]) if dataloader_idx < len(singles) else None


def is_padding(trainer: pl.Trainer, batch_idx: int, dataloader_idx: int = 0) -> bool:
    """Return whether this rank has no sample of the batch, and so computes a sample again."""
    splitter = running_batches(trainer, dataloader_idx)
    return splitter is not None and splitter.is_padding(batch_idx)


def metrics_of(pl_module: pl.LightningModule) -> list[Metric]:
    """Return a module's metrics: submodules, and elements of dict, list or tuple attributes."""
    candidates: list[Any] = [*named_metrics(pl_module).values()]
    for value in vars(pl_module).values():
        candidates += value.values() if isinstance(value, dict) else ()
        # ``iter``, because the length of a user's list may raise.
        candidates += iter(value) if isinstance(value, (list, tuple)) else ()
    return [value for value in candidates if isinstance(value, Metric)]


def pad_metric_lists(trainer: pl.Trainer, metrics: list[Metric]) -> None:
    """Cast each metric state to one dtype on all ranks, and pad its list to one length.

    An update in 64 or 16 bits changes the dtype of a state. A rank may have had fewer updates, so
    its state may have another dtype, and gloo would abort the process. Some metrics, such as those
    of retrieval, gather a list element by element, so the lengths must be equal as well.
    """
    states = [(metric, name) for metric in metrics for name in metric.metric_state]
    descriptions = [describe_state(getattr(metric, name)) for metric, name in states]
    by_rank = gather(trainer, descriptions) if states else []
    for (metric, name), of_ranks in zip(states, zip(*by_rank, strict=True), strict=True):
        state = getattr(metric, name)
        kinds = [(dtype, shape) for _, dtype, shape in of_ranks if dtype is not None]
        if not kinds:
            continue  # lists that are empty on all ranks
        dtype = reduce(torch.promote_types, (dtype for dtype, _ in kinds))
        if isinstance(state, Tensor):
            setattr(metric, name, state.to(dtype))
            continue
        empty = torch.zeros(0, *kinds[0][1], dtype=dtype, device=trainer.strategy.root_device)
        state[:] = [tensor.to(dtype) for tensor in state]
        state += [empty] * (max(length for length, *_ in of_ranks) - len(state))


def describe_state(state: Any) -> tuple[int, torch.dtype | None, torch.Size]:
    """Return a state's list length (0 for a tensor), its dtype, and the shape of a row.

    The dtype is None for an empty list, and for a list of other objects than tensors.
    """
    if isinstance(state, Tensor):
        return 0, state.dtype, state.shape[1:]
    if not state or not isinstance(state[-1], Tensor):  # such as the masks of detection
        return 0, None, torch.Size()
    return len(state), state[-1].dtype, state[-1].shape[1:]
