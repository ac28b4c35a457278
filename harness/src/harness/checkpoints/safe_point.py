"""Write checkpoints between two optimizer steps, and resume from them.

In: a run's folder, and the intervals between checkpoints. Next: ``attributes`` and
``value_states`` add the state that Lightning's checkpoints lack, ``writing`` writes the file, and
``compat.resume`` fixes state that Lightning restores wrongly.
"""

import logging
import math
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl
from pytorch_lightning import callbacks

from harness.checkpoints import lookup, value_states
from harness.checkpoints.attributes import Attributes
from harness.checkpoints.reading import ATTRIBUTES, FORMAT
from harness.checkpoints.user_hooks import begins_epochs, changes_weights_at_end, norms
from harness.checkpoints.writing import DurableCheckpointIO
from harness.compat import callbacks_of, resume
from harness.distributed.gather import gather
from harness.distributed.should_stop import is_time_over
from harness.distributed.shutdown import SignalHandlers
from harness.distributed.vote import Vote
from harness.errors import AgreedExit
from harness.files import remove_partial_files
from harness.loggers.rewind import Logs
from harness.loggers.tensorboard import WRITE_ALL

log = logging.getLogger(__name__)

# A checkpoint precedes each validation that takes longer: if a signal arrives inside a validation,
# the run must end within distributed.shutdown.PATIENCE_SECONDS.
LONG_SECONDS = 2.0


class SafePoint(pl.Callback):
    """Write checkpoints from which a run resumes as if it had never stopped.

    It saves at the start of an optimizer step. A checkpoint at the end of a batch would lose a
    validation that is due, and one inside an accumulation would lose gradients. Saving happens
    before the step, so callbacks after this one have not acted yet. A resume runs them once.

    Args:
        folder: the folder of the checkpoints.
        every_n_steps: save when the number of steps passes a multiple of this.
        every_minutes: also save when so much time has passed since the last checkpoint.
        num_kept: how many checkpoints to keep. With two, a run survives a damaged one.
        saves: if false, save nothing, but handle signals and stop all ranks together.
    """

    def __init__(
        self,
        folder: Path,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        num_kept: int = 2,
        saves: bool = True,
    ) -> None:
        self.folder, self.num_kept, self.saves = folder, num_kept, saves
        self.every_n_steps = math.inf if every_n_steps is None else every_n_steps
        self.every_seconds = math.inf if every_minutes is None else 60 * every_minutes
        self.logs, self.signals = Logs(folder.parent), SignalHandlers()
        self.attributes = Attributes()
        self.loaded: dict[str, Any] = {}  # entries of a checkpoint, until they are restored
        self.vote: Any = None  # a Vote, during a training
        self.synchronized_stop: Any = None  # a SynchronizedStop, from ``on_train_start`` on
        self.norms_at_end: Any = None  # norms of the weights before on_train_end hooks
        self.saved_step, self.saved_time = 0, time.monotonic()
        self.is_writing = self.has_begun = False
        self.are_weights_new = False  # on_train_end hooks have changed the weights
        self.saved_since_vote = False  # True: the last vote is outdated, because a save followed it
        self.validation_seconds = math.inf  # unknown before the first validation
        self.validates_long = 1  # whether a rank found that a validation takes long

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Handle signals, and prepare to save."""
        self.signals.install()
        if stage == "fit":
            self.vote = Vote(trainer)
            assert isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO)
            self.io = trainer.strategy.checkpoint_io
            self.signals.before_leaving = self.io.finish
            if trainer.is_global_zero:
                remove_partial_files(self.folder)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the entries that later hooks restore; let a longer run have a longer schedule."""
        if not trainer.training:
            return
        self.loaded = checkpoint["safe_point"] | {"attributes": checkpoint[ATTRIBUTES]}
        # The loaders determine how many batches make a step.
        resume.make_loaders(trainer, checkpoint.get("loaders_made_at", {"train": 0}))
        before, now = self.loaded["batches_per_step"], int(trainer.accumulate_grad_batches)
        resume.repair_counters(checkpoint, before, now)
        resume.repair_model_checkpoints(trainer, checkpoint["callbacks"])
        planned = self.loaded["num_steps_planned"]
        for schedule in checkpoint["lr_schedulers"]:
            length = schedule.get("total_steps")
            if length == planned and length != trainer.estimated_stepping_batches:
                resume.forget_length(schedule)
                if trainer.is_global_zero:
                    log.warning(
                        "The learning-rate schedule now ends at step %s. The steps until now "
                        "followed a schedule that ended at step %s.",
                        trainer.estimated_stepping_batches,
                        length,
                    )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the values that callbacks read."""
        self.attributes.record_before_hooks(trainer)
        if self.loaded:
            value_states.restore_shared_state(trainer, self.loaded["all_ranks"])
            self.saved_step = self.loaded["step"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Cut the logs to their length at the checkpoint; start to time the next checkpoint."""
        self.signals.wait_for_step = self.has_begun = True
        self._cut_logs(trainer)
        self.saved_time = time.monotonic()
        self.batches_per_step = trainer.accumulate_grad_batches  # before a callback changes it

    def _cut_logs(self, trainer: pl.Trainer) -> None:
        """Cut the logs, restore the logged values, and rename newer, damaged checkpoints.

        It runs when all checks of the command have passed, and nothing has been logged yet.
        """
        if not self.loaded:
            return
        # Restore them again, because a sanity check resets logged values.
        value_states.restore_shared_state(trainer, self.loaded["all_ranks"])
        if trainer.is_global_zero:
            path = Path(str(trainer.ckpt_path))
            self.logs.rewind(self.loaded["logs"])
            lookup.set_aside_newer(path)
            log.info("Resuming from %s.", path)

    def begin_epochs(self, trainer: pl.Trainer) -> None:
        """Restore the checkpoint's state after all start hooks, before a batch is read."""
        self.attributes.record_after_hooks(trainer)
        if self.loaded:
            self.limit_val_batches = resume.hold_validation(trainer)
            is_inside = self.loaded["each_rank"] is not None
            if is_inside:
                self.attributes.pack_before_epoch(trainer)
                resume.begin_epoch(trainer, [*filter(begins_epochs, callbacks_of(trainer))])
            elif counts := self.loaded.get("each_rank_at_end"):
                value_states.restore_rank_states(trainer, counts)
            self.attributes.restore(trainer, self.loaded["attributes"], is_last=not is_inside)
        # A start hook may have set trainer.should_stop.
        self.synchronized_stop.combine(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """If this batch begins an optimizer step: finish a resume, save, or leave."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        if self.loaded:
            resume.end_restart(trainer, self.limit_val_batches)
            if self.loaded["each_rank"] is not None:
                # Restore again: since then, hooks that transfer the first batch have run.
                self.attributes.restore(trainer, self.loaded["attributes"])
                value_states.restore_rank_states(trainer, self.loaded["each_rank"])
            self.loaded = {}
        is_due, signum, stop = 0, 0, self.synchronized_stop
        answer = self.vote.ask(
            time.monotonic() - self.saved_time >= self.every_seconds,
            self.signals.received,
            self.validation_seconds > LONG_SECONDS,
            stop.is_wanted,
        )
        if answer is not None:
            is_due, signum, self.validates_long, stop.is_voted = answer
            is_due &= not self.saved_since_vote
            self.saved_since_vote = False
        is_due |= self.validates_long and resume.validation_follows(trainer, batch_idx)
        every = self.every_n_steps
        is_due |= trainer.global_step // every > self.saved_step // every
        if is_due or signum:
            self._save(trainer)
        if signum:
            self._leave(trainer, signum)

    def on_validation_start(self, *_: Any) -> None:
        """Start to time this validation; end the run if a signal has waited for too long."""
        self.signals.is_validating = True
        self.signals.leave_if_late()
        self.validation_started = time.monotonic()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Store the duration of this validation as an estimate for the next one."""
        self.signals.is_validating = False
        if not trainer.sanity_checking:
            self.validation_seconds = time.monotonic() - self.validation_started

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last checkpoint, or let ``end_late`` save it after hooks that set weights."""
        self.norms_at_end = norms(pl_module) if changes_weights_at_end(trainer) else None
        if self.norms_at_end is None:
            self._end(trainer)

    def end_late(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last checkpoint after all hooks, if one of them may have set other weights."""
        if self.norms_at_end is not None:
            self.are_weights_new = norms(pl_module) != self.norms_at_end
            self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        self._save(trainer, is_end=True)
        self.signals.wait_for_step = False  # from now on a signal ends the run at once
        if signum := max(gather(trainer, self.signals.received, self.vote.group)):
            self._leave(trainer, signum)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the state of a resumed run that had nothing left to train."""
        if self.loaded:
            if not self.has_begun:  # otherwise ``on_train_start`` has cut the logs
                self._cut_logs(trainer)
            else:
                trainer.limit_val_batches = self.limit_val_batches
            self.attributes.restore(trainer, self.loaded["attributes"])
            self.are_weights_new |= self.loaded.get("are_weights_new", False)
            for callback in callbacks_of(trainer):
                if isinstance(callback, callbacks.WeightAveraging):
                    callback.on_train_end(trainer, pl_module)
        self.loaded = {}

    def teardown(self, *_: Any, **__: Any) -> None:
        """Restore the signal handlers."""
        self.signals.restore()

    on_exception = teardown

    def _save(self, trainer: pl.Trainer, is_end: bool = False) -> None:
        if not self.saves or ((step := trainer.global_step) == self.saved_step and not is_end):
            return
        for logger in trainer.loggers:  # a checkpoint must not precede its logs
            getattr(logger, WRITE_ALL, logger.save)()
        self.logged = self.logs.record() if trainer.is_global_zero else None
        path = lookup.path_of(self.folder, step)

        def on_safe() -> None:
            lookup.link_newest(path)
            lookup.remove_old(self.folder, self.num_kept)

        self.is_writing, self.is_end = True, is_end
        try:
            trainer.save_checkpoint(path, weights_only=False, storage_options=on_safe)
        finally:
            self.is_writing = False
        self.saved_step, self.saved_time = step, time.monotonic()
        self.saved_since_vote = True
        if is_end:
            self.io.finish()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add changed attributes; to a checkpoint of this callback, add the state in the epoch."""
        if self.vote is not None:
            checkpoint[ATTRIBUTES] = self.attributes.keep(trainer, self.vote.group)
        if not self.is_writing:
            return  # another callback's checkpoint, from which no run resumes
        counts = gather(trainer, value_states.rank_state(trainer, self.is_end), self.vote.group)
        # A resumed run may have more time.
        stops = trainer.should_stop and not is_time_over(trainer)
        checkpoint["safe_point"] = {
            "format": FORMAT,
            "step": trainer.global_step,
            "are_weights_new": self.are_weights_new,
            "logs": self.logged,
            "batches_per_step": self.batches_per_step,
            "all_ranks": value_states.shared_state(trainer) | {"should_stop": stops},
            "each_rank": None if self.is_end else counts,
            "each_rank_at_end": counts if self.is_end else None,
            "num_steps_planned": int(min(trainer.estimated_stepping_batches, 2**62)),
        }

    def _leave(self, trainer: pl.Trainer, signum: int) -> NoReturn:
        """Exit once the checkpoint is safe. All ranks call this at the same step."""
        self.io.finish()
        if trainer.is_global_zero:
            step = trainer.global_step
            is_saved = lookup.path_of(self.folder, step).exists()  # no checkpoint before step 1
            log.warning(
                "%s: %s step %d. %s",
                *(signal.Signals(signum).name, "saved" if is_saved else "not saved at", step),
                f"Resume with resume={self.folder.parent}"
                if self.saves
                else "checkpoint=null saves nothing.",
            )
        trainer.strategy.barrier()
        raise AgreedExit(128 + signum)
