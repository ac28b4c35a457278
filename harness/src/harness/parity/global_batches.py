"""The callback that gives all samples of a global batch the same weight, under any strategy.

In: the loaders that the Trainer requests, and the position in a checkpoint. Out: loaders that give
each rank its local batches from that position on, and gradients weighted by the local batch's size.
A loader that a user's hook requests stays as it is. Next: ``data/`` splits the batches, and
``mean_over.py`` weights losses that are not means over samples.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch.optim import Optimizer

from harness.compat.resume import position_in
from harness.data.datamodule import DataModule
from harness.data.loaders import flat_loaders
from harness.data.randomness import mix_seed, preserved_generators, seed_generators
from harness.data.shared_batches import SharedBatchSampler
from harness.data.streams import SharedStream
from harness.data.wrap_loaders import wrap_loaders
from harness.distributed.gather import gather
from harness.errors import UserError
from harness.parity import mean_over as means
from harness.strategies.sync_batch_norm import batch_norm_warning

log = logging.getLogger(__name__)
BatchSplitter = SharedBatchSampler | SharedStream  # splits a loader's batches over the ranks


class GlobalBatches(pl.Callback):
    """Wrap the loaders when they are made, and weight the gradients of uneven local batches.

    Strategies average ranks with equal weights, and Lightning does so with accumulated batches.
    If the local batches differ in size, as in an epoch's last batch, the gradient of each is
    multiplied by ``SharedBatchSampler.weight``. Losses and logged values stay as they are.

    Args:
        seed: seeds the samplers, together with the epoch.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.start = (0, 0)  # the epoch, and the step in it, where training starts
        self.loaded: list[dict[str, Any]] = []  # state of each loader, from the checkpoint
        self.splitters: list[BatchSplitter] = []  # of each training loader
        self.made_at: dict[str, int] = {}  # by split: the epoch in which its loaders were made
        self.weight = 1.0
        self.batches_per_step = 1
        self.has_trained = self.has_warned = False
        self.means: Any = None  # a Means while a run trains, else None

    def make_loaders(
        self, trainer: pl.Trainer, source: Any, method: str, request: Callable[[], Any]
    ) -> Any:
        """Make the loaders of a split, and let each rank read its local batches.

        Args:
            trainer: the trainer that requests the loaders.
            source: the data module, or the module.
            method: the name of its method, such as ``train_dataloader``.
            request: calls that method.
        """
        name, split = f"{type(source).__name__}.{method}", method.removesuffix("_dataloader")
        every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set untyped
        epoch = trainer.current_epoch // every * every if every else 0  # epoch of the last reload
        with preserved_generators():  # a random split made here is the same on all ranks
            seed_generators(mix_seed(self.seed, epoch))
            made = request()
        if made is None:
            raise UserError(f"{name} returned None. Return the DataLoader.")
        seed = source.seed if isinstance(source, DataModule) else self.seed
        loaders = wrap_loaders(made, trainer, split, name, seed)
        if split == "train" or every:
            self.made_at[split] = trainer.current_epoch
        if split == "train":
            self.begin(loaders)
        return loaders

    def begin(self, loaders: Any) -> None:
        """Start the training loaders at the checkpoint's position."""
        self.splitters = [s for s in map(splitter_of, flat_loaders(loaders)) if s is not None]
        self._restore_loaders()

    def _restore_loaders(self) -> None:
        """Move the loaders to ``start``; refuse settings that differ from the checkpoint's."""
        saved_by_loader = [*self.loaded, *[{}] * len(self.splitters)]
        for splitter, saved in zip(self.splitters, saved_by_loader, strict=False):
            splitter.start_at(*self.start, saved)
            settings = splitter.settings()
            for name, before in saved.get("settings", {}).items():
                if settings.get(name) != before:
                    raise UserError(
                        f"The run used {name}={before}, but this command has {name}="
                        f"{settings.get(name)}: the batches would differ.\n"
                        "Resume with the data and settings of that run, or start a new run."
                    )
        self.loaded = [] if self.splitters else self.loaded

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let ``mean_over`` and ``sum_over`` weight losses."""
        self.batches_per_step = int(trainer.accumulate_grad_batches)  # accumulated
        self.means = means.Means(trainer, lambda: self.weight)
        means.set_counter(self.means.count)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Let ``mean_over`` and ``sum_over`` act as they do outside of training."""
        means.set_counter(None)

    on_exception = on_train_end

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the weight of this rank's local batch."""
        # Checked here, because hooks before this one may freeze layers.
        is_first = batch_idx == 0 and not self.has_warned
        if is_first and (warning := batch_norm_warning(trainer, pl_module)):
            log.warning("%s", warning)
            self.has_warned = True
        self.has_trained = True
        is_only = len(self.splitters) == 1  # if there are several loaders, some may have ended
        running = [s for s in self.splitters if is_only or s.counts(batch_idx)[1]]
        self.weight, *other_weights = {s.weight(batch_idx) for s in running} or {1.0}
        if other_weights:
            raise UserError(
                f"Several loaders give batch {batch_idx} of an epoch, but {trainer.world_size} "
                "processes cannot split all of these batches evenly. The loss of each loader would "
                "need its own weight, but the run can weight only the whole loss.\nUse batch sizes "
                "that are multiples of "
                f"{trainer.world_size}, with drop_last=True, or train with one process."
            )
        if batch_idx == 0 and trainer.world_size > 1:
            check_same_batches(trainer, self.splitters)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Multiply the gradient of the loss by the weight; the loss keeps its value."""
        self.means.check(loss)
        weight = self.weight
        if weight != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Divide gradients of accumulated ``mean_over`` losses by the weight of all batches."""
        self.means.correct(optimizer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of losses that counted as 0; refuse samplers whose batches differ by rank."""
        self.means.warn_of_lost()
        if trainer.world_size > 1:
            check_same_batches(trainer, self.splitters)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise if the run should have trained, and the loader gave no batch."""
        wanted = (trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches)
        if not self.has_trained and self.start == (0, 0) and 0 not in wanted:
            source = getattr(trainer, "datamodule", None) or pl_module
            raise UserError(
                f"{type(source).__name__}.train_dataloader gave no batch: nothing was trained.\n"
                "If the data set is smaller than a batch, use drop_last=False."
            )

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the position and state of the loaders."""
        position = position_in(checkpoint, self.batches_per_step)
        checkpoint["loaders"] = [s.state_at(*position) for s in self.splitters]
        checkpoint["loaders_made_at"] = dict(self.made_at)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read the position where training starts, and the state of the loaders."""
        if not trainer.training:
            return
        default = trainer.accumulate_grad_batches
        batches_per_step = checkpoint.get("safe_point", {}).get("batches_per_step", default)
        self.start = position_in(checkpoint, batches_per_step)
        self.loaded = checkpoint.get("loaders", [])
        self._restore_loaders()  # in case a user's hook has already requested the loaders


def splitter_of(loader: Any) -> BatchSplitter | None:
    """Return the sampler or stream that splits a loader's batches over the ranks, or None."""
    splitter = getattr(loader, "batch_sampler", None)
    return splitter if isinstance(splitter, BatchSplitter) else None


def check_same_batches(trainer: pl.Trainer, splitters: list[BatchSplitter]) -> None:
    """Refuse, on every rank, samplers that draw different batches on different ranks."""
    samplers = [s for s in splitters if isinstance(s, SharedBatchSampler) and s.num_ranks > 1]
    if not samplers:
        return
    counts = [len(s.sums) for s in samplers]
    drawn = gather(trainer, checksums(samplers, counts))
    if any(of_rank[0] != drawn[0][0] for of_rank in drawn):
        # A rank with workers has drawn ahead: compare only the batches that all ranks have drawn.
        counts = [min(numbers) for numbers in zip(*(counts for counts, _ in drawn), strict=True)]
        drawn = gather(trainer, checksums(samplers, counts))
    for sampler, sums in zip(samplers, zip(*(sums for _, sums in drawn), strict=True), strict=True):
        if len({*sums}) > 1:
            raise UserError(
                f"{sampler.name} draws different batches in each process, so the processes cannot "
                "split one global batch.\nRemove the split by rank from the sampler: the library "
                "splits each batch over the ranks. Draw random numbers from torch, NumPy or "
                "random, which are seeded alike on all ranks."
            )


def checksums(samplers: list[SharedBatchSampler], counts: list[int]) -> tuple[list[int], list[Any]]:
    """Return the counts, and for each sampler its size and the checksum of so many batches."""
    return counts, [
        (s.settings()["num_samples"], s.sums[count - 1])
        for s, count in zip(samplers, counts, strict=True)
    ]
