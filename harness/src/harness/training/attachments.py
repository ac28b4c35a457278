"""All that the library attaches to a run, in order, each with its reason.

In: the config, and the objects that ``build`` has made. Out: a Trainer that is ready to fit.
The library attaches at four moments:

1. ``trainer_plugins`` and ``trainer_callbacks``: arguments of the Trainer.
2. ``attach``: once the Trainer exists.
3. ``Attachments.setup``: once Lightning has connected the module, the data and the strategy.
4. ``Attachments.on_train_start``: functions that run after all hooks of the user.

``Attachments.teardown`` undoes 4. Of 3, it restores ``self.log``, the logger connector and the
strategy's methods. The loops, the signal handlers, the profiler, the module's precision,
``LightningModule.__setattr__`` and ``is_param_in_hook_signature`` keep their changes.

Other files attach the following, each in its own place, because it needs an object of that place:

- ``training/build.py`` guards the loggers, so that a logger that fails does not stop the run. It
  adds the config's callbacks, such as those of ``conf/watch/default.yaml``, after the library's.
- ``features/speed.py`` compiles the networks and changes their memory layout, if the config says
  so. A strategy that splits, shards or replaces layers does so by itself: see ``strategies``.
- ``data/datamodule.py`` sets ``trainer.accumulate_grad_batches``, because only its
  ``train_dataloader`` knows the batch size that ``data.max_samples_per_device`` splits.
- ``parity/gathering.py`` replaces the module's epoch-end hook for one call, to refuse collectives
  there: the module's lists already hold the values of all ranks. It also lets DDP broadcast buffers
  only in the first step of an evaluation, because ranks compute different numbers of steps.
- ``compat/precision.py``, below ``callbacks=ema``, keeps the averaged weights until the end of
  ``on_validation_end`` by ``run_last``, so that all callbacks see the network that was validated.

All other work is done in public hooks of the callbacks.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.strategies import DDPStrategy

from harness import provenance
from harness.checkpoints.safe_point import SafePoint
from harness.checkpoints.writing import DurableCheckpointIO
from harness.compat import callbacks_of, find_callback
from harness.compat.final_values import before_reading, read_as_before
from harness.compat.hooks import around_hooks, on_request, restore_hooks, run_last
from harness.compat.one_rank import HOOKS, seen_as_one_rank
from harness.compat.precision import clip_without_scaler, double_before_loading
from harness.compat.processes import keep_lightning_from_signals
from harness.compat.step_overhead import skip_needless_work
from harness.distributed.launcher import environments
from harness.distributed.should_stop import SynchronizedStop
from harness.distributed.start_ranks import patch_lightning_launcher
from harness.features.speed import SWITCHES, Speed
from harness.monitoring.learning import Learning
from harness.monitoring.objective import MonitorCheck
from harness.parity.combine_values import RankCombiner
from harness.parity.gathering import Gathering
from harness.parity.global_batches import GlobalBatches
from harness.parity.parity_callback import ParityChecks
from harness.parity.seeded_steps import SeededSteps
from harness.parity.self_log import SelfLog
from harness.strategies import ddp
from harness.training import summary
from harness.training.optimizer_states import OptimizerStates

SAFE_POINT = ("every_n_steps", "every_minutes", "num_kept")


def trainer_plugins(cfg: DictConfig) -> dict[str, Any]:
    """Return the Trainer's ``plugins``, and ``sync_batchnorm`` if the library replaces it."""
    # Only a training trusts its checkpoint: an evaluation ignores its run's checkpoint.trusted.
    is_trusted = "resume" in cfg and bool(OmegaConf.select(cfg, "checkpoint.trusted"))
    plugins: list[Any] = [
        DurableCheckpointIO(is_trusted),  # writes checkpoints atomically, in a thread
        *environments(),  # read the ranks that torchrun or Slurm assigned
    ]
    on_cpu = cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available()
    if cfg.trainer.sync_batchnorm and on_cpu:  # torch's own layer runs on GPUs only
        from harness.strategies.sync_batch_norm import SyncBatchNormAnywhere

        return {"plugins": [*plugins, SyncBatchNormAnywhere()], "sync_batchnorm": False}
    return {"plugins": plugins}


def trainer_callbacks(cfg: DictConfig, freezing: list[pl.Callback]) -> list[pl.Callback]:
    """Return the library's callbacks, which come before the config's callbacks."""
    is_training = "resume" in cfg
    is_saved = is_training and not cfg.trainer.fast_dev_run
    # GlobalBatches precedes SafePoint, whose on_load_checkpoint requests the loaders.
    callbacks: list[pl.Callback] = [Attachments(), GlobalBatches(cfg.seed)]
    if is_training:
        show_batch = summary.show_batch  # prints the global batch size
        callbacks.append(pl.callbacks.LambdaCallback(on_train_start=show_batch))
    if is_saved:
        note = partial(provenance.note_training, Path(cfg.run_dir))  # writes record.json
        callbacks.append(OptimizerStates())  # refuses a checkpoint before SafePoint cuts the logs
        callbacks.append(pl.callbacks.LambdaCallback(on_train_start=note))
    callbacks.append(Speed(*map(cfg.get, SWITCHES)))  # compile, channels_last, tf32
    callbacks += freezing  # init.freeze
    if is_saved:  # before callbacks whose actions in a step a resume would repeat
        checkpoint = cfg.checkpoint or {}
        settings = {key: checkpoint[key] for key in SAFE_POINT if key in checkpoint}
        folder = Path(cfg.run_dir, "checkpoints")
        callbacks.append(SafePoint(folder, **settings, saves=cfg.checkpoint is not None))
    callbacks.append(SeededSteps(cfg.seed))  # equal random numbers under any strategy
    callbacks.append(RankCombiner())  # logged values and metrics count all samples once
    # Compares some steps of the run, computed whole and in parts.
    callbacks.append(ParityChecks(cfg.get("parity_check", True)))
    if is_training:
        callbacks += [Learning(), MonitorCheck()]  # stop if it learns nothing or logs no monitor
    return callbacks


def attach(trainer: pl.Trainer, model: pl.LightningModule, data: Any) -> None:
    """Attach the library to the Trainer, its strategy and its launcher, before the Trainer runs."""
    # Strategy: this DDP wraps the module again when parameters are frozen or unfrozen.
    if type(trainer.strategy) is DDPStrategy:
        trainer.strategy.__class__ = ddp.DDPStrategy
    # Lightning's launcher: it adopts ranks that were started early, and names a rank that dies.
    patch_lightning_launcher()
    # Callbacks of the library and the profiler: Lightning does not call the hooks that they lack.
    # LightningModule: the name of the running hook is set without the checks of nn.Module.
    # is_param_in_hook_signature: each method of the user is inspected once, and not in each step.
    skip_needless_work(trainer)
    # setup, *_dataloader, configure_optimizers: the user's code sees a world size of 1, so that
    # batch sizes and samplers are those of the global batch.
    around_hooks(trainer, [hooked for hooked in (model, data) if hooked], HOOKS, seen_as_one_rank)
    # Precision plugin: 16-mixed without a scaler may clip gradients by value, as 32-true may.
    clip_without_scaler(trainer)


class Attachments(pl.Callback):
    """Attach the library to the module, the strategy and the loops, until the stage ends."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Attach the library before weights are loaded and before a loader is requested."""
        # Loops: each loader that Lightning requests is wrapped, so that a rank reads its local
        # batch of the global batch.
        if batches := find_callback(trainer, GlobalBatches):
            on_request(trainer, partial(batches.make_loaders, trainer))
        if find_callback(trainer, SafePoint):
            # Trainer: Lightning handles no signals. Its handler would wait for the other ranks.
            keep_lightning_from_signals(trainer)
            # Module: convert it for 64-true before a checkpoint is loaded, to keep all digits.
            double_before_loading(trainer, pl_module)
        if evaluation := find_callback(trainer, RankCombiner):
            # Module and callbacks: ``self.log`` weights values by the samples of all ranks.
            evaluation.self_log = vars(pl_module)["log"] = SelfLog(trainer, pl_module)
            lend_self_log(trainer, pl_module)
            # Logger connector: it combines a value over the ranks before Lightning reads it, and
            # then passes the value to callbacks that have ``on_values``.
            before_reading(
                trainer,
                batch=evaluation.end_batch,
                loader=evaluation.end_loader,
                hooks=evaluation.end_epoch,
            )
            # Strategy: all_gather and the steps count each sample of an evaluation once.
            if trainer.world_size > 1:
                evaluation.gathering = Gathering(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach functions that run after the hooks of all callbacks, the module and strategy."""
        if safe_point := find_callback(trainer, SafePoint):
            stop = safe_point.synchronized_stop = SynchronizedStop(safe_point.vote.group)
            # A resumed run restores its state after hooks that would overwrite it.
            run_last(trainer, "on_train_start", partial(safe_point.begin_epochs, trainer))
            # A complete run is saved after hooks that set other weights.
            run_last(trainer, "on_train_end", partial(safe_point.end_late, trainer, pl_module))
            # If one rank sets trainer.should_stop, all ranks stop at the same step.
            before_reading(trainer, batch=stop.hold, epoch=stop.end_epoch)
            run_last(trainer, "on_validation_end", partial(stop.combine, trainer))
        # Ranks draw different random numbers in a step, and equal ones in the hooks before it.
        if trainer.global_rank > 0 and (seeded := find_callback(trainer, SeededSteps)):
            seed_rank = partial(seeded.seed_rank, trainer, pl_module)
            run_last(trainer, "on_train_batch_start", seed_rank)
        # The parity check computes some steps whole and as local batches.
        if (parity := find_callback(trainer, ParityChecks)) and parity.begin(trainer):
            before_batch = partial(parity.before_batch, trainer, pl_module)
            run_last(trainer, "on_train_batch_start", before_batch)

    def teardown(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Restore the module, the strategy and Lightning."""
        vars(pl_module).pop("log", None)
        lend_self_log(trainer, pl_module)
        read_as_before(trainer)
        evaluation = find_callback(trainer, RankCombiner)
        if evaluation is not None and evaluation.gathering is not None:
            evaluation.gathering.remove()
            evaluation.gathering = None
        restore_hooks(trainer)

    on_exception = teardown


def lend_self_log(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Set ``self.log`` of each callback to the module's, as Lightning does before ``setup``."""
    for callback in callbacks_of(trainer):
        vars(callback)["log"] = pl_module.log
