"""The callback that lets every sample of a global batch count alike, under any strategy.

In: the loaders that the Trainer asks for, and the position of a checkpoint. Out: loaders that give
each process its share from there on, and gradients that are weighted by the share. A loader that
the user's hook asks for stays as it is. Next: ``data/`` shares the batches, ``mean_over.py`` weighs
losses that are no means over samples.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch.optim import Optimizer

from harness.data.datamodule import DataModule
from harness.data.loaders import leaves
from harness.data.randomness import mix, preserved_generators, seed_generators
from harness.data.shared_batches import SharedBatchSampler
from harness.data.sharing import share
from harness.data.streams import SharedStream
from harness.errors import UserError
from harness.exact import mean_over as means
from harness.processes.agreement import gather
from harness.strategies.sync_batch_norm import sees_shares_alone
from harness.upstream.hooks import on_request
from harness.upstream.resume import position_in

log = logging.getLogger(__name__)
Shares = SharedBatchSampler | SharedStream


class GlobalBatches(pl.Callback):
    """Take over loaders where they are made, and weigh the gradients of uneven shares.

    Strategies average processes, and batches accumulated for one step, with equal weights. Where
    these hold shares of unequal size, as in an epoch's last batch, each share's gradient is
    multiplied by ``SharedBatchSampler.weight``. Losses and logged values stay as they are.

    Args:
        seed: decides, with the epoch, what samplers draw.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.start = (0, 0)  # epoch, and step in it, at which training begins
        self.loaded: list[dict[str, Any]] = []  # the checkpoint's state of each loader
        self.sharing: list[Shares] = []  # of the loaders that train
        self.made_at: dict[str, int] = {}  # epoch in which loaders were made, of each split
        self.weight = 1.0
        self.batches_per_step = 1
        self.has_trained = self.has_warned = False
        self.means: Any = None  # a Means, while a run trains

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the loaders that the Trainer asks for, of the data module, or else of the module."""
        on_request(trainer, partial(self.make_loaders, trainer))

    def make_loaders(
        self, trainer: pl.Trainer, owner: Any, method: str, request: Callable[[], Any]
    ) -> Any:
        """Make the loaders of a split, and let each process read its share."""
        name, split = f"{type(owner).__name__}.{method}", method.removesuffix("_dataloader")
        every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]  # set untyped
        epoch = trainer.current_epoch // every * every if every else 0  # at which they are made
        with preserved_generators():  # a split that is drawn here is one for all ranks and splits
            seed_generators(mix(self.seed, epoch))
            made = request()
        if made is None:
            raise UserError(f"{name} returned nothing: return the loader that it makes.")
        seed = owner.seed if isinstance(owner, DataModule) else self.seed
        loaders = share(made, trainer, split, name, seed)
        if split == "train" or every:
            self.made_at[split] = trainer.current_epoch
        if split == "train":
            self.begin(loaders)
        return loaders

    def begin(self, loaders: Any) -> None:
        """Let the loaders that train begin where the run was stopped, or refuse other batches."""
        self.sharing = [one for one in map(shares_of, leaves(loaders)) if one is not None]
        self._go_on()

    def _go_on(self) -> None:
        saved_by_loader = [*self.loaded, *[{}] * len(self.sharing)]
        for sharing, saved in zip(self.sharing, saved_by_loader, strict=False):
            sharing.start_at(*self.start, saved)
            settings = sharing.settings()
            for name, before in saved.get("settings", {}).items():
                if settings.get(name) != before:
                    raise UserError(
                        f"The checkpoint's run had {name}={before}, and now it is "
                        f"{settings.get(name)}: the batches would differ.\n"
                        "Resume with what the run began with."
                    )
        self.loaded = [] if self.sharing else self.loaded

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let losses say what they are means over."""
        self.batches_per_step = int(trainer.accumulate_grad_batches)  # of which a batch was split
        self.means = means.Means(trainer, lambda: self.weight)
        means.use(self.means.count)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Weigh no loss any more."""
        means.use(None)

    on_exception = on_train_end

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the weight of this process's share."""
        is_asked = batch_idx == 0 and not self.has_warned
        if is_asked and (warning := sees_shares_alone(trainer, pl_module)):
            log.warning("%s", warning)  # now that hooks have chosen what trains
            self.has_warned = True
        self.has_trained = True
        is_one = len(self.sharing) == 1  # of several, some may have ended
        running = [one for one in self.sharing if is_one or one.counts(batch_idx)[1]]
        self.weight, *others = {one.weight(batch_idx) for one in running} or {1.0}
        if others:
            raise UserError(
                f"Several loaders give batch {batch_idx} of an epoch, and {trainer.world_size} "
                "processes cannot share all of them evenly: a sum of losses has one weight.\n"
                "Use batch sizes that the processes divide, with drop_last=True, or one process."
            )
        if batch_idx == 0 and trainer.world_size > 1:
            check_same_batches(trainer, self.sharing)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Scale what flows back from the loss, not the loss."""
        self.means.check(loss)
        weight = self.weight
        if weight != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Divide by what all of the step's batches are means over."""
        self.means.correct(optimizer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse samplers that have drawn other batches in another process."""
        self.means.warn_of_lost()
        if trainer.world_size > 1:
            check_same_batches(trainer, self.sharing)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a training without a single batch."""
        wanted = (trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches)
        if not self.has_trained and self.start == (0, 0) and 0 not in wanted:
            owner = getattr(trainer, "datamodule", None) or pl_module
            raise UserError(
                f"{type(owner).__name__}.train_dataloader gave no batch: nothing was trained."
            )

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add what is needed to read on from here."""
        position = position_in(checkpoint, self.batches_per_step)
        checkpoint["loaders"] = [one.state_at(*position) for one in self.sharing]
        checkpoint["loaders_made_at"] = dict(self.made_at)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Read where the training begins."""
        if not trainer.training:
            return
        here = trainer.accumulate_grad_batches
        batches_per_step = checkpoint.get("safe_point", {}).get("batches_per_step", here)
        self.start = position_in(checkpoint, batches_per_step)
        self.loaded = checkpoint.get("loaders", [])
        self._go_on()  # where an author's hook has asked for the loaders before


def shares_of(loader: Any) -> Shares | None:
    """Return the sampler or stream that shares the batches of a loader; ``None`` without one."""
    sharing = getattr(loader, "batch_sampler", None)
    return sharing if isinstance(sharing, Shares) else None


def check_same_batches(trainer: pl.Trainer, sharing: list[Shares]) -> None:
    """Refuse, in every process, samplers that draw other batches in each of them."""
    samplers = [s for s in sharing if isinstance(s, SharedBatchSampler) and s.num_ranks > 1]
    if not samplers:
        return
    # Workers, which not every process needs to have, read ahead: as many batches are compared as
    # all have drawn.
    counts = zip(*gather(trainer, [len(s.sums) for s in samplers]), strict=True)
    mine = [
        (s.settings()["num_samples"], s.sums[min(drawn) - 1])
        for s, drawn in zip(samplers, counts, strict=True)
    ]
    for sampler, sums in zip(samplers, zip(*gather(trainer, mine), strict=True), strict=True):
        if len({*sums}) > 1:
            raise UserError(
                f"{sampler.name} draws other batches in each process, which would share "
                "nothing.\nLeave the split by rank out: the harness splits each batch, which a "
                "sampler draws from torch's, NumPy's or Python's generator, the same on all ranks."
            )
