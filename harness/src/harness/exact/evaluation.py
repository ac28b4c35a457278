import warnings
from functools import partial
from math import isclose
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from harness.data.shared_batches import SharedBatchSampler
from harness.data.sharing import leaves
from harness.errors import UserError
from harness.exact.collected import CollectedLists, gathers_itself
from harness.exact.gathering import Gathering
from harness.exact.global_batches import Shares, check_same_batches, shares_of
from harness.exact.metric_states import StatesTogether
from harness.processes.agreement import gather
from harness.upstream import logged_values
from harness.upstream.step_values import at_end_of_batch, end_batch, note_sizes


def evaluated(trainer: pl.Trainer) -> Any:
    """The loaders of the evaluation that runs."""
    return trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders


def shares_running(trainer: pl.Trainer, dataloader_idx: int = 0) -> Shares | None:
    """What is known of the loader whose batches are running."""
    loaders = evaluated(trainer) if trainer.evaluating else trainer.train_dataloader
    if (only := shares_of(loaders)) is not None:  # one loader, without a look at collections
        return only
    found = leaves(loaders)
    return shares_of(found[dataloader_idx]) if dataloader_idx < len(found) else None


def is_filler(trainer: pl.Trainer, batch_idx: int = 0, dataloader_idx: int = 0) -> bool:
    """Whether the batch is there only because every process must take part in every step."""
    sharing = shares_running(trainer, dataloader_idx)
    return sharing is not None and sharing.is_filler(batch_idx)


class ExactEvaluation(pl.Callback):
    """Make what several processes log equal to what one process would.

    - A value that a step logs, a mean, sum, largest or smallest one, is that of all samples, with
      or without ``sync_dist=True``, and each batch counts by the samples that its sampler gave.
    - Lists that a module collects are gathered: see ``CollectedLists``.
    - What a hook at the end of an evaluation logs must be the same in every process.
    - A process without a batch of its own takes part in every collective with another's: metrics,
      lists and logged values forget what that has added.
    """

    def __init__(self) -> None:
        # Not a dict: the hash of a metric changes with its state.
        self.kept: list[tuple[Metric, dict[str, Any]]] | None = None
        self.collected: CollectedLists | None = None
        self.has_gathered = False
        self.gathering: Gathering | None = None  # of several processes
        self.num_samples: int | None = None  # of this process in the batch that runs
        self.counted: dict[str, Any] = {}  # numbers of the module, before the hook
        self.told: set[str] = set()  # metrics that are logged at steps
        self.group: Any = None  # of the processes, for what is on the host

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look at logged values before they are computed, and gather metrics' states at once."""
        at_end_of_batch(trainer, partial(self._end_batch, trainer))
        if trainer.world_size > 1:
            # It is made so, or refused.
            warnings.filterwarnings("ignore", "It is recommended to use .self.log.*sync_dist=True")
            logged_values.at_end_of_values(trainer, partial(self._complete, trainer))
            self.gathering = Gathering(trainer)
            for metric in metrics_of(pl_module):
                metric.dist_sync_fn = metric.dist_sync_fn or StatesTogether(metric)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the values of whole batches."""
        note_sizes(trainer, lambda: self.num_samples, self._weigh)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the strategy as it was."""
        if self.gathering is not None:
            self.gathering.remove()
            self.gathering = None
        for metric in metrics_of(pl_module):
            if isinstance(metric.dist_sync_fn, StatesTogether):
                metric.dist_sync_fn = None

    def on_train_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count samples; before a filler, remember the states of all metrics and logged values."""
        sharing = shares_running(trainer, dataloader_idx)
        is_filler = sharing is not None and sharing.is_filler(batch_idx)
        num_samples = None if sharing is None else sharing.num_samples_in(batch_idx)
        self.num_samples = 0 if is_filler else num_samples
        if self.gathering is not None:
            in_turn = isinstance(sharing, SharedBatchSampler) and sharing.in_turn
            self.gathering.is_whole = bool(trainer.evaluating) and in_turn
            self.gathering.batch_idx = None if trainer.evaluating else batch_idx
            self.gathering.num_samples = self.num_samples
        if sharing is None:
            return
        logged_values.count_samples(trainer, num_samples)
        if self.collected is not None:
            self.collected.begin_batch(is_filler)
        if is_filler:
            self.kept = [
                (metric, {name: _copy(value) for name, value in metric.metric_state.items()})
                for metric in [*metrics_of(pl_module), *logged_values.logged_means(trainer)]
            ]

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """What is gathered from here on is gathered as it is."""
        if self.gathering is not None:
            self.gathering.is_whole, self.gathering.batch_idx = False, None

    on_validation_batch_end = on_test_batch_end = on_train_batch_end

    def _end_batch(self, trainer: pl.Trainer) -> None:
        if self.kept is not None:
            self._forget_filler(trainer, self.kept)
            self.kept = None
        if trainer.training:
            end_batch(trainer, gather, self.told)

    def _weigh(self, size: Any) -> None:
        if self.gathering is not None:
            self.gathering.weight = size

    def _forget_filler(self, trainer: pl.Trainer, kept: list[tuple[Metric, Any]]) -> None:
        if self.collected is not None:
            self.collected.end_filler()
        known = {id(metric) for metric, _ in kept}
        for metric, states in kept:
            for name, before in states.items():
                now = getattr(metric, name)
                setattr(metric, name, _without_rows(metric, now, before))
        for logged in logged_values.logged_means(trainer):
            if id(logged) not in known:  # logged for the first time
                logged_values.start_anew(logged)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the module's lists."""
        self.collected = CollectedLists(pl_module) if trainer.world_size > 1 else None

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather what the module has collected, before its own hook reads it."""
        collected, self.collected = self.collected, None
        if collected is None:
            return
        sharing = map(shares_of, leaves(evaluated(trainer)))
        check_same_batches(trainer, [one for one in sharing if one is not None])
        if not gathers_itself(pl_module, _hook(trainer)):
            self.group = self.group or dist.new_group(backend="gloo")
            self.has_gathered = collected.gather(trainer, self.group)
        self.counted = collected.counted()
        assert self.gathering is not None
        if self.has_gathered:  # the hook must not gather once more
            self.gathering.is_whole = True
            if self.counted:
                self.gathering.refusal = (
                    f"{_hook(trainer)} calls self.all_gather, but lists of the module already hold "
                    "what all processes have collected, and its numbers one process's counts.\n"
                    "Append what is counted to a list as well, and leave self.all_gather out."
                )

    on_test_epoch_end = on_validation_epoch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse values of one process's samples.

        Raises:
            UserError: if the hook at the end has logged what is not the same in every process.
        """
        has_gathered, self.has_gathered = self.has_gathered, False
        if self.gathering is None:
            return
        self.gathering.is_whole, self.gathering.refusal = False, ""
        hook = _hook(trainer)
        mine = logged_values.of_hook(trainer, hook)
        counts = {float(n) for n in self.counted.values() if not isinstance(n, dict) and _is_one(n)}
        everyone = gather(trainer, {name: (*how, how[0] in counts) for name, how in mine.items()})
        for name in dict.fromkeys(name for one in everyone for name in one):
            found = [one[name] for one in everyone if name in one]
            values, operations, are_counts = zip(*found, strict=True)
            is_same = all(isclose(v, values[0], rel_tol=1e-6) for v in values)
            is_same |= all(v != v for v in values)  # NaN in every process
            is_same &= not all(are_counts) or not any(values)  # equal by chance, of other samples
            if operations[0] == "sum" and has_gathered:
                raise UserError(
                    f"{name}, logged in {hook}, is summed over the processes (sync_dist=True), and "
                    "the lists of the module already hold what all of them have collected.\n"
                    "Leave sync_dist=True out, or log it in the step."
                )
            if not is_same and operations[0] in (None, "mean"):
                raise UserError(
                    f"{name}, logged in {hook}, is each process's own "
                    f"({', '.join(f'{value:.6g}' for value in values)}): each has counted its own "
                    "samples.\nLog it in the step, log a torchmetrics metric, or append what it is "
                    "computed from to a list of the module (self.outputs), which is gathered. "
                    "If it is process 0's own, such as a time: self.log(..., rank_zero_only=True)."
                )

    on_test_end = on_validation_end

    def _complete(self, trainer: pl.Trainer) -> None:
        if trainer.training or trainer.evaluating:
            logged_values.combine(trainer, gather)


def metrics_of(pl_module: pl.LightningModule) -> list[Metric]:
    """The metrics that are part of a module."""
    return [module for module in pl_module.modules() if isinstance(module, Metric)]


def _hook(trainer: pl.Trainer) -> str:
    return "on_test_epoch_end" if trainer.testing else "on_validation_epoch_end"


def _is_one(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def _copy(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()


def _without_rows(metric: Metric, now: Any, before: Any) -> Any:
    """A state without what was added to it.

    Where it is a list, every process must have as many tensors in it, or the one that has fewer
    would leave the others waiting: those that were added stay, with no row.
    """
    if not isinstance(now, list):
        return before
    added = now[len(before) :]
    if any(tensor.dim() == 0 for tensor in added):
        raise UserError(
            f"{type(metric).__name__} keeps a number of each batch, and the processes have unequal "
            "numbers of batches.\nLet it keep tensors with one row per sample, or use one process."
        )
    return before + [tensor[:0] for tensor in added]
