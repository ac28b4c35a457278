import inspect
import logging
from collections.abc import Callable
from math import isclose
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from harness.data.sharing import leaves
from harness.errors import UserError
from harness.exact.collected import CollectedLists
from harness.exact.gathering import Gathering
from harness.exact.global_batches import Shares, check_same_batches, shares_of
from harness.exact.self_log import SelfLog
from harness.processes.agreement import gather
from harness.upstream.logged_values import NoCollectives, before_reading

log = logging.getLogger(__name__)
LIBRARIES = ("pytorch_lightning", "lightning_fabric", "torchmetrics")


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
    """Make what several processes log and evaluate equal to what one process would.

    - What a step logs is the value of all samples: see ``SelfLog``.
    - An evaluation's steps wait for nobody: see ``Gathering``.
    - Lists that a module collects are gathered before the hook at the end: see ``CollectedLists``.
    - What that hook logs must be the same in every process.
    - Metrics forget what a training step has added that this process has no sample of.
    """

    def __init__(self) -> None:
        self.self_log: SelfLog | None = None
        self.gathering: Gathering | None = None  # of several processes
        self.collected: CollectedLists | None = None
        self.kept: list[tuple[Metric, dict[str, Any]]] = []  # states before a filler
        self.has_gathered = False
        self.counted: dict[str, Any] = {}  # numbers of the module that the steps have changed
        self.told: set[str] = set()
        self.group: Any = None  # of the processes, for what is on the host

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stand in for ``self.log``."""
        self.self_log = SelfLog(trainer, pl_module)
        vars(pl_module)["log"] = self.self_log
        ends = (self._end_batch, self._end_loader, self._end_epoch)
        before_reading(trainer, *(_of(trainer, end) for end in ends))
        if trainer.world_size > 1:
            self.gathering = Gathering(trainer)

    def teardown(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Leave module, strategy and Lightning as they were."""
        if self.self_log is not None and vars(pl_module).get("log") is self.self_log:
            del vars(pl_module)["log"]
        before_reading(trainer)
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
        """Count samples; before a filler, remember the states of all metrics."""
        sharing = shares_running(trainer, dataloader_idx)
        is_filler = sharing is not None and sharing.is_filler(batch_idx)
        num_samples = None if sharing is None else sharing.num_samples_in(batch_idx)
        assert self.self_log is not None
        self.self_log.begin_batch(batch, 0 if is_filler else num_samples, batch_idx, dataloader_idx)
        if self.gathering is not None:
            self.gathering.begin_batch(sharing, batch_idx, dataloader_idx)
        if self.collected is not None:
            self.collected.begin_batch(batch_idx, dataloader_idx)
        if is_filler:
            self.kept = [
                (metric, {name: _copy(value) for name, value in metric.metric_state.items()})
                for metric in metrics_of(pl_module)
            ]

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    def _end_batch(self, trainer: pl.Trainer) -> None:
        for metric, states in self.kept:
            for name, before in states.items():
                setattr(metric, name, _without_rows(getattr(metric, name), before))
        self.kept = []
        assert self.self_log is not None
        self.self_log.end_batch()

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """What is gathered from here on is gathered as it is."""
        if self.gathering is not None:
            self.gathering.end_batch()

    on_validation_batch_end = on_test_batch_end = on_train_batch_end

    def _end_loader(self, trainer: pl.Trainer) -> None:
        assert self.self_log is not None
        self.self_log.combine()
        if trainer.world_size > 1 and not trainer.training:
            _even_out(trainer, metrics_of(trainer.lightning_module))

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the module's lists."""
        self.collected = CollectedLists(pl_module) if trainer.world_size > 1 else None

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather what the module has collected, before its own hook reads it."""
        collected, self.collected = self.collected, None
        if collected is None or self.gathering is None:
            return
        sharing = map(shares_of, leaves(evaluated(trainer)))
        check_same_batches(trainer, [one for one in sharing if one is not None])
        self.group = self.group or dist.new_group(backend="gloo")
        self.has_gathered = collected.gather(trainer, self.group)
        self.counted = collected.counted()
        if not self.has_gathered:
            return
        hook = _hook(trainer)
        self.gathering.is_whole = True  # the hook must not gather once more
        if self.counted:
            self.gathering.refusal = (
                f"{hook} calls self.all_gather, but lists of the module already hold "
                "what all processes have collected, and its numbers one process's counts.\n"
                "Append what is counted to a list as well, and leave self.all_gather out."
            )
        original = getattr(pl_module, hook)

        def guarded() -> None:
            del vars(pl_module)[hook]
            with NoCollectives(lambda: refuse_again(hook)):
                original()

        vars(pl_module)[hook] = guarded

    on_test_epoch_end = on_validation_epoch_end

    def _end_epoch(self, trainer: pl.Trainer) -> None:
        """Refuse values of one process's samples.

        Raises:
            UserError: if the hook at the end has logged what is not the same in every process.
        """
        if self.gathering is not None:
            self.gathering.is_whole, self.gathering.refusal = False, ""
        assert self.self_log is not None
        self.self_log.combine_at_end(self._refuse)
        self.has_gathered, self.counted = False, {}

    def _refuse(self, name: str, hook: str, values: list[float | None], added: Any) -> None:
        """Look at a value that a hook at the end of an epoch has logged in each process."""
        if added:
            if added == "sum" and self.has_gathered:
                raise UserError(
                    f"{name}, logged in {hook}, is summed over the processes (sync_dist=True), and "
                    "the lists of the module already hold what all of them have collected.\n"
                    "Leave sync_dist=True out, or log it in the step."
                )
            return
        counts = [float(n) for n in self.counted.values() if _is_one(n)]
        known = [value for value in values if value is not None]
        is_same = all(isclose(v, known[0], rel_tol=1e-6) or v != v for v in known)
        is_count = known[0] in counts and any(known)  # equal by chance, of other samples
        if is_same and not is_count and len(known) == len(values):
            return
        said = (
            f"{name}, logged in {hook}, is each process's own ("
            + ", ".join("none" if v is None else f"{v:.6g}" for v in values)
            + ")"
        )
        rank_zero = "If it is process 0's own, such as a time: self.log(..., rank_zero_only=True)."
        assert self.self_log is not None
        if self.self_log.trainer.training:
            if name not in self.told and self.self_log.trainer.is_global_zero:
                log.warning("%s: the log has process 0's.\nLog it in the step. %s", said, rank_zero)
            self.told.add(name)
            return
        raise UserError(
            f"{said}: each has counted its own samples.\n"
            "Log it in the step, log a torchmetrics metric, or append what it is "
            f"computed from to a list of the module (self.outputs), which is gathered. {rank_zero}"
        )


def refuse_again(hook: str) -> None:
    """Refuse an author's own collective operation where lists hold everything already."""
    frame: Any = inspect.currentframe()
    while frame.f_globals["__name__"].partition(".")[0] in ("harness", "torch"):
        frame = frame.f_back
    if frame.f_globals["__name__"].partition(".")[0] not in LIBRARIES:
        raise UserError(
            f"{hook} calls torch.distributed, and the lists of the module already hold what all "
            "processes have collected.\nLeave it out, or use self.all_gather, which knows."
        )


def metrics_of(pl_module: pl.LightningModule) -> list[Metric]:
    """The metrics that are part of a module, or in a dict or list of its own."""
    held = [*pl_module.modules()]
    for value in vars(pl_module).values():  # a plain dict or list of metrics is no module
        held += value.values() if isinstance(value, dict) else ()
        held += value if isinstance(value, (list, tuple)) else ()
    return [one for one in held if isinstance(one, Metric)]


def _of(trainer: pl.Trainer, end: Callable[[pl.Trainer], None]) -> Callable[[], None]:
    return lambda: end(trainer)


def _hook(trainer: pl.Trainer) -> str:
    return "on_test_epoch_end" if trainer.testing else "on_validation_epoch_end"


def _is_one(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


def _copy(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()


def _without_rows(now: Any, before: Any) -> Any:
    """A state without what was added to it; of a list's tensors their number stays."""
    is_list = isinstance(now, list)
    return before + [_empty(tensor) for tensor in now[len(before) :]] if is_list else before


def _even_out(trainer: pl.Trainer, metrics: list[Metric]) -> None:
    """Let lists be of one length in all processes, of which some have had a batch less.

    Some metrics gather the tensors of their lists one by one.
    """
    lists = [s for metric in metrics for s in metric.metric_state.values() if isinstance(s, list)]
    lengths_of_all = gather(trainer, [*map(len, lists)]) if lists else []
    for state, lengths in zip(lists, zip(*lengths_of_all, strict=True), strict=True):
        last = state[-1] if state else torch.zeros(0, device=trainer.strategy.root_device)
        state += [_empty(last)] * (max(lengths) - len(state))


def _empty(tensor: Tensor) -> Tensor:
    return tensor.new_zeros(0, *tensor.shape[1:])
