"""Combine logged values, metrics and lists of all processes before anybody reads them.

In: each batch that begins, and its share of the samples. Out: at the end of a loader or epoch
``SelfLog`` and ``Gathering`` combine the processes, before Lightning and the module's own hook
read. What that hook logs must be the same in every process.
"""

import logging
from functools import reduce
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from harness.data.batches import Batch
from harness.data.loaders import leaves
from harness.errors import UserError
from harness.exact.gathering import Gathering
from harness.exact.global_batches import Shares, check_same_batches, shares_of
from harness.exact.self_log import SelfLog
from harness.processes.agreement import gather
from harness.strategies.sync_batch_norm import SyncBatchNorm
from harness.upstream.final_values import before_reading, read_as_before
from harness.upstream.logged_values import (
    LoggedValue,
    Pair,
    metric_counts,
    named_metrics,
    reduced,
    restore_metric,
)

log = logging.getLogger(__name__)


class ExactEvaluation(pl.Callback):
    """Make what several processes log and evaluate equal to what one process would."""

    def __init__(self) -> None:
        self.self_log: Any = None  # a SelfLog, from ``setup`` on
        self.gathering: Gathering | None = None  # of several processes
        self.before: list[tuple[Metric, dict[str, Any]]] = []  # metrics' counts before padding
        self.warned: set[str] = set()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace ``log`` of the module and of callbacks, and the strategy's ``all_gather``."""
        self.self_log = vars(pl_module)["log"] = SelfLog(trainer, pl_module)
        lend_log(trainer, pl_module)
        before_reading(
            trainer, batch=self._end_batch, loader=self._end_loader, hooks=self._end_epoch
        )
        if trainer.world_size > 1:
            self.gathering = Gathering(trainer, pl_module)

    def teardown(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Leave module, strategy and Lightning as they were."""
        vars(pl_module).pop("log", None)
        lend_log(trainer, pl_module)
        read_as_before(trainer)
        if self.gathering is not None:
            self.gathering.remove()
            self.gathering = None

    on_exception = teardown

    def on_train_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Announce the batch; before padding, remember what all metrics have counted."""
        sharing = shares_running(trainer, dataloader_idx)
        num_samples = None if sharing is None else sharing.num_samples_in(batch_idx)
        SyncBatchNorm.is_padding = sharing is not None and sharing.is_padding(batch_idx)
        if SyncBatchNorm.is_padding:
            num_samples = 0
            self.before = [(metric, metric_counts(metric)) for metric in metrics_of(pl_module)]
        self.self_log.begin_batch(batch, num_samples, batch_idx, dataloader_idx)
        if self.gathering is not None:
            self.gathering.begin_batch(sharing, batch_idx, dataloader_idx)

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    def on_predict_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Give writers of predictions plain lists: iterating over a ``Batch`` seeds generators."""
        loop = trainer.predict_loop
        if isinstance(loop.current_batch_indices, Batch):
            loop.current_batch_indices = loop.current_batch_indices[:]
        for batches in loop.epoch_batch_indices:
            batches[-1:] = [batch[:] for batch in batches[-1:]]

    def _end_batch(self, trainer: pl.Trainer) -> None:
        for metric, counts in self.before:
            restore_metric(metric, counts, trainer.strategy.root_device)
        self.before, SyncBatchNorm.is_padding = [], False
        self.self_log.end_batch()
        if self.gathering is not None:
            self.gathering.end_batch()

    def _end_loader(self, trainer: pl.Trainer) -> None:
        self.self_log.combine()
        if trainer.world_size > 1:
            align(trainer, metrics_of(trainer.lightning_module))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather what the module has collected, before its own hook reads it."""
        if self.gathering is not None:
            sharing = map(shares_of, leaves(evaluated(trainer)))
            check_same_batches(trainer, [one for one in sharing if one is not None])
            self.gathering.gather_lists()

    on_test_epoch_end = on_validation_epoch_end

    def _end_epoch(self, trainer: pl.Trainer) -> None:
        for logged, by_rank in self.self_log.of_all_processes():
            self._settle(trainer, logged, by_rank)
        if self.gathering is not None:
            self.gathering.has_global = False

    def _settle(self, trainer: pl.Trainer, logged: LoggedValue, by_rank: list[Pair | None]) -> None:
        """Make what a hook at an epoch's end has logged in each process one value, or refuse it."""
        name, hook, op = (logged.how[key] for key in ("name", "fx", "reduce_fx"))
        pairs = [pair for pair in by_rank if pair]
        is_everywhere = len(pairs) == len(by_rank)
        if logged.how.get("sync_dist") and op != "mean" and is_everywhere:
            assert self.gathering is not None
            if op == "sum" and self.gathering.has_global:
                raise UserError(
                    f"{name}, logged in {hook}, is summed over the processes (sync_dist=True), and "
                    "the lists of the module already hold what all of them have collected.\n"
                    "Leave sync_dist=True out, or log it in the step."
                )
            logged.complete_epoch(pairs)
            return
        logged.complete_epoch(pairs[:1])
        numbers = [reduced(op, *pair) for pair in pairs]
        if is_everywhere and np.allclose(numbers, numbers[0], rtol=1e-6, atol=0, equal_nan=True):
            return
        values = ", ".join(f"{reduced(op, *pair):.6g}" if pair else "none" for pair in by_rank)
        sentence = f"{name}, logged in {hook}, is each process's own ({values})"
        rank_zero = "If it is process 0's own, such as a time: self.log(..., rank_zero_only=True)."
        if not trainer.training:
            raise UserError(
                f"{sentence}: each has counted its own samples.\n"
                "Log it in the step, log a torchmetrics metric, or append what it is "
                "computed from to a list of the module (self.outputs), which is gathered. "
                f"{rank_zero}"
            )
        if name not in self.warned and trainer.is_global_zero:
            log.warning("%s: the log has process 0's.\nLog it in the step. %s", sentence, rank_zero)
        self.warned.add(name)


def lend_log(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Let ``self.log`` of each callback be the module's, which Lightning has lent them before."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set untyped
        callback.log = pl_module.log


def evaluated(trainer: pl.Trainer) -> Any:
    """Return the loaders of the evaluation that runs."""
    return trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders


def shares_running(trainer: pl.Trainer, dataloader_idx: int = 0) -> Shares | None:
    """Return the shares of the loader whose batches are running."""
    loaders = evaluated(trainer) if trainer.evaluating else trainer.train_dataloader
    if (only := shares_of(loaders)) is not None:  # one loader, without a look at collections
        return only
    singles = leaves(loaders)
    return shares_of(singles[dataloader_idx]) if dataloader_idx < len(singles) else None


def is_padding(trainer: pl.Trainer, batch_idx: int, dataloader_idx: int = 0) -> bool:
    """Return whether the batch only lets this process take part in a step of the others."""
    sharing = shares_running(trainer, dataloader_idx)
    return sharing is not None and sharing.is_padding(batch_idx)


def metrics_of(pl_module: pl.LightningModule) -> list[Metric]:
    """List the metrics that are part of a module, or in a plain dict or list of its own."""
    held: list[Any] = [*named_metrics(pl_module).values()]
    for value in vars(pl_module).values():
        held += value.values() if isinstance(value, dict) else ()
        held += iter(value) if isinstance(value, (list, tuple)) else ()  # its length may raise
    return [one for one in held if isinstance(one, Metric)]


def align(trainer: pl.Trainer, metrics: list[Metric]) -> None:
    """Give states of metrics one type in all ranks, and their lists one length.

    A metric changes its type during an update in 64 or 16 bits, and a rank may have had fewer or
    no updates: the collectives of gloo end the process where types differ. Some metrics, of
    retrieval for example, gather the tensors of their lists one by one.
    """
    states = [(metric, name) for metric in metrics for name in metric.metric_state]
    mine = [described(getattr(metric, name)) for metric, name in states]
    everyone = gather(trainer, mine) if states else []
    for (metric, name), found in zip(states, zip(*everyone, strict=True), strict=True):
        state = getattr(metric, name)
        kinds = [(dtype, shape) for _, dtype, shape in found if dtype is not None]
        if not kinds:
            continue  # lists that are empty in all ranks
        dtype = reduce(torch.promote_types, (dtype for dtype, _ in kinds))
        if isinstance(state, Tensor):
            setattr(metric, name, state.to(dtype))
            continue
        empty = torch.zeros(0, *kinds[0][1], dtype=dtype, device=trainer.strategy.root_device)
        state[:] = [tensor.to(dtype) for tensor in state]
        state += [empty] * (max(length for length, *_ in found) - len(state))


def described(state: Any) -> tuple[int, torch.dtype | None, torch.Size]:
    """Return the length of a list of tensors, and the type and the rows' shape of tensors."""
    if isinstance(state, Tensor):
        return 0, state.dtype, state.shape[1:]
    if not state or not isinstance(state[-1], Tensor):  # of detection's masks, for example
        return 0, None, torch.Size()
    return len(state), state[-1].dtype, state[-1].shape[1:]
