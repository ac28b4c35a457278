"""All that the library attaches to a run, in order, each with its reason.

In: the config, and the objects that ``build`` has made. Out: a Trainer that is ready to fit.
A run passes four moments:

1. ``trainer_plugins`` and ``trainer_callbacks``: arguments of the Trainer.
2. ``attach``: once the Trainer exists.
3. ``Attachments.setup``: once Lightning has connected the module, the data and the strategy.
4. ``Attachments.on_train_start``: functions that run after all hooks of the user.

``Attachments.teardown`` removes 3 and 4. All other work is done in public hooks of the callbacks
that ``trainer_callbacks`` lists. A strategy that splits or shards a network does so by itself: see
``strategies``. Loggers are guarded in ``build``, so that one that fails costs no result.
"""

from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.strategies import DDPStrategy

from harness import provenance
from harness.checkpoints.safe_point import SafePoint
from harness.checkpoints.writing import DurableCheckpointIO
from harness.compat import callbacks_of
from harness.compat.final_values import before_reading, read_as_before
from harness.compat.hooks import around_hooks, on_request, restore_hooks, run_last
from harness.compat.one_rank import HOOKS, seen_as_one_rank
from harness.compat.precision import clip_without_scaler, double_before_loading
from harness.compat.processes import keep_lightning_from_signals
from harness.compat.step_overhead import skip_unimplemented_hooks
from harness.distributed.launcher import environments
from harness.distributed.should_stop import SynchronizedStop
from harness.distributed.start_ranks import patch_lightning_launcher
from harness.features.speed import SWITCHES, Speed
from harness.monitoring.learning import Learning
from harness.monitoring.objective import Objective
from harness.parity.evaluation import ExactEvaluation
from harness.parity.gathering import Gathering
from harness.parity.global_batches import GlobalBatches
from harness.parity.parity_callback import ParityChecks
from harness.parity.seeded_steps import SeededSteps
from harness.parity.self_log import SelfLog
from harness.strategies import ddp
from harness.training import summary
from harness.training.optimizer_states import OptimizerStates

C = TypeVar("C", bound=pl.Callback)
SAFE_POINT = ("every_n_steps", "every_minutes", "num_kept")


def trainer_plugins(cfg: DictConfig) -> dict[str, Any]:
    """Return the Trainer's ``plugins``, and ``sync_batchnorm`` where the library replaces it."""
    # Only a training trusts its checkpoints: an evaluation ignores checkpoint.trusted of its run.
    is_trusted = "resume" in cfg and bool(OmegaConf.select(cfg, "checkpoint.trusted"))
    plugins: list[Any] = [
        DurableCheckpointIO(is_trusted),  # writes plain files, atomically, in a thread
        *environments(),  # read what torchrun or Slurm says about ranks
    ]
    on_cpu = cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available()
    if cfg.trainer.sync_batchnorm and on_cpu:  # torch's own layer runs on GPUs only
        from harness.strategies.sync_batch_norm import SyncBatchNormAnywhere

        return {"plugins": [*plugins, SyncBatchNormAnywhere()], "sync_batchnorm": False}
    return {"plugins": plugins}


def trainer_callbacks(cfg: DictConfig, freezing: list[pl.Callback]) -> list[pl.Callback]:
    """Return the library's callbacks, which come before those of the config."""
    is_training = "resume" in cfg
    is_saved = is_training and not cfg.trainer.fast_dev_run
    # First, because SafePoint.on_load_checkpoint asks for the loaders.
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
    if is_saved:  # before every callback with an effect in a step
        given = cfg.checkpoint or {}
        settings = {key: given[key] for key in SAFE_POINT if key in given}
        folder = Path(cfg.run_dir, "checkpoints")
        callbacks.append(SafePoint(folder, **settings, saves=cfg.checkpoint is not None))
    callbacks.append(SeededSteps(cfg.seed))  # each batch draws the same under any strategy
    callbacks.append(ExactEvaluation())  # logged values and metrics count all samples once
    callbacks.append(ParityChecks(cfg.get("parity_check", True)))  # compares the first batches
    if is_training:
        callbacks += [Learning(), Objective()]  # stop a run that learns nothing or logs no monitor
    return callbacks


def attach(trainer: pl.Trainer, model: pl.LightningModule, data: Any) -> None:
    """Attach what a Trainer needs as soon as it exists."""
    # strategy.__class__: DDP wraps the module again when parameters are frozen or unfrozen.
    if type(trainer.strategy) is DDPStrategy:
        trainer.strategy.__class__ = ddp.DDPStrategy
    # Lightning's launcher: it adopts ranks that were started early, and names a rank that dies.
    patch_lightning_launcher()
    # The library's callbacks, and the profiler: hooks that they lack cost no call in a step.
    skip_unimplemented_hooks(trainer)
    # setup, *_dataloader, configure_optimizers: the user's code sees a world size of 1, so that
    # batch sizes and samplers are those of the global batch.
    around_hooks(trainer, [one for one in (model, data) if one], HOOKS, seen_as_one_rank)
    # 16-mixed without a scaler: clipping by value works as in 32 bits.
    clip_without_scaler(trainer)


class Attachments(pl.Callback):
    """Attach to the module, the strategy and the loops, and detach when the stage ends."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Attach before weights are loaded and before the first loader is asked for."""
        # Loops: each loader that Lightning asks for is wrapped, so that a rank reads its local
        # batch of the global batch.
        if batches := one_of(trainer, GlobalBatches):
            on_request(trainer, partial(batches.make_loaders, trainer))
        if one_of(trainer, SafePoint):
            # Trainer: it handles no signals. A handler of Lightning's waits for the other ranks.
            keep_lightning_from_signals(trainer)
            # Module: 64-true converts it before a checkpoint is loaded, which else loses digits.
            double_before_loading(trainer, pl_module)
        if evaluation := one_of(trainer, ExactEvaluation):
            # Module and callbacks: values that ``self.log`` gets count all samples of all ranks.
            evaluation.self_log = vars(pl_module)["log"] = SelfLog(trainer, pl_module)
            lend_log(trainer, pl_module)
            # Logger connector: ranks are combined before Lightning reads a value. Then callbacks
            # get it in ``on_values``.
            before_reading(
                trainer,
                batch=evaluation.end_batch,
                loader=evaluation.end_loader,
                hooks=evaluation.end_epoch,
            )
            # Strategy: all_gather and the steps, so that each sample of an evaluation counts once.
            if trainer.world_size > 1:
                evaluation.gathering = Gathering(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach what runs after the hooks of all callbacks, the module and the strategy."""
        if safe_point := one_of(trainer, SafePoint):
            stopping = safe_point.stopping = SynchronizedStop(safe_point.agreement.group)
            # A resumed run gets its state after hooks that would overwrite it.
            run_last(trainer, "on_train_start", partial(safe_point.begin_epochs, trainer))
            # A run that is complete is saved after hooks that set other weights.
            run_last(trainer, "on_train_end", partial(safe_point.end_late, trainer, pl_module))
            # trainer.should_stop of one rank stops all ranks at the same step.
            before_reading(
                trainer,
                batch=stopping.hold,
                epoch=stopping.end_epoch,
            )
            run_last(trainer, "on_validation_end", partial(stopping.combine, trainer))
        # Ranks draw different numbers in a step, and the same ones in the hooks before it.
        if trainer.global_rank > 0 and (seeded := one_of(trainer, SeededSteps)):
            seed_rank = partial(seeded.seed_rank, trainer, pl_module)
            run_last(trainer, "on_train_batch_start", seed_rank)
        # The first batches are computed whole and in parts, and compared.
        if (parity := one_of(trainer, ParityChecks)) and parity.begin(trainer):
            before_batch = partial(parity.before_batch, trainer, pl_module)
            run_last(trainer, "on_train_batch_start", before_batch)

    def teardown(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        """Leave the module, the strategy and Lightning as they were."""
        vars(pl_module).pop("log", None)
        lend_log(trainer, pl_module)
        read_as_before(trainer)
        evaluation = one_of(trainer, ExactEvaluation)
        if evaluation is not None and evaluation.gathering is not None:
            evaluation.gathering.remove()
            evaluation.gathering = None
        restore_hooks(trainer)

    on_exception = teardown


def one_of(trainer: pl.Trainer, kind: type[C]) -> C | None:
    """Return the Trainer's callback of a class; a dry run, for one, has no ``SafePoint``."""
    return next((one for one in callbacks_of(trainer) if isinstance(one, kind)), None)


def lend_log(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Let ``self.log`` of each callback be the module's, which Lightning has lent them before."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set untyped
        callback.log = pl_module.log
