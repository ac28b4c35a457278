"""Build the objects that a run's config names: data, module, loggers, callbacks, and the Trainer.

In: the config. Out: the objects, whose arguments are Python values and never the config. Next:
``train`` calls the Trainer, which fits, tests or predicts.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig

from harness import provenance
from harness.compat import versions
from harness.data import facts
from harness.distributed.launcher import global_rank
from harness.errors import UserError
from harness.features import trackers
from harness.files import write_yaml
from harness.init.settings import read_init
from harness.loggers.tensorboard import guarded
from harness.targets import instantiate, packages_named
from harness.training import log_file, summary
from harness.training.attachments import attach, trainer_callbacks, trainer_plugins
from harness.training.check_targets import check_kinds, check_targets

log = logging.getLogger(__name__)


def build(cfg: DictConfig) -> tuple[pl.Trainer, pl.LightningModule, pl.LightningDataModule | None]:
    """Build a Trainer, a module and a data module, which is ``None`` with ``data: null``.

    Raises:
        UserError: if a ``_target_`` does not exist or does not take its arguments.
    """
    with as_user_errors():
        check_targets(cfg)
    is_first = global_rank() == 0
    # torch's own messages are about its compiler, and stay out of the log.
    log_file.start(Path(cfg.run_dir, "run.log"), packages_named(cfg) - {"torch"}, is_first)
    if is_first and (changes := provenance.changes(training_folder(cfg))):
        log.warning("%s", changes)
    seed(cfg)
    with as_user_errors(cfg):
        data = make_data(cfg)
        model, freezing = make_model(cfg)
        trackers.send_no_reports()
        loggers = [guarded(make(node)) for node in cfg.logger.values() if node]
        callbacks = configured_callbacks(cfg, has_loggers=bool(loggers))
        check_kinds(model, data, callbacks, loggers)
        trainer = instantiate(
            cfg.trainer,
            **trainer_plugins(cfg),
            callbacks=[*trainer_callbacks(cfg, freezing), *callbacks],
            logger=loggers,
            default_root_dir=cfg.run_dir,
            enable_checkpointing=any(isinstance(c, pl.callbacks.Checkpoint) for c in callbacks),
            _convert_="all",
        )
    versions.check(trainer)
    attach(trainer, model, data)
    return trainer, model, data


@contextmanager
def as_user_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Replace errors of Hydra, Lightning and torch about wrong settings by a ``UserError``."""
    try:
        yield
    except Exception as error:
        from harness.training import user_errors  # only a run that fails imports it

        if message := user_errors.describe_config_error(error, cfg):
            raise UserError(message) from error
        raise


def seed(cfg: DictConfig) -> None:
    """Seed all generators before a stage, so ``evaluate`` draws the numbers of the run's test."""
    pl.seed_everything(cfg.seed, workers=True, verbose=False)


def make(node: DictConfig) -> Any:
    """Build the object that a config node names, with Python values as arguments."""
    return instantiate(node, _convert_="all")


def make_data(cfg: DictConfig) -> Any:
    """Build the data module, and replace the config's ``from_data.`` values by its facts.

    A new run writes the facts into its folder. A resumed run, an evaluation and an export read
    the facts from there.
    """
    data = None if cfg.data is None else make(cfg.data)
    if "resume" in cfg and cfg.resume is None:
        filled = facts.fill_in(cfg, data)
        if filled and global_rank() == 0:
            write_yaml(Path(cfg.run_dir, facts.FILE), json.dumps(filled, indent=2) + "\n")
        return data
    run_dir = training_folder(cfg)
    facts.restore_facts(data, run_dir)
    facts.fill_in(cfg, data, run_dir)
    return data


def make_model(cfg: DictConfig) -> tuple[Any, list[pl.Callback]]:
    """Build the module with the weights of ``init``, and a callback for frozen parameters.

    Only a new run loads these weights. A resumed run loads its checkpoint.
    """
    model = make(cfg.model)
    if "resume" not in cfg or not isinstance(model, pl.LightningModule):
        return model, []
    init = read_init(cfg.get("init"))
    if init.path is not None and cfg.resume is None:
        from harness.init.weights import start_from  # only a run that starts from weights needs it

        rows, lines = start_from(model, init)
        if global_rank() == 0:
            summary.show(rows)
            log.info("\n".join(lines))
    if not init.freeze:
        return model, []
    from harness.init.freezing import Freezing  # only init.freeze needs it

    freezing = Freezing(init.freeze, init.unfreeze_at_epoch)
    freezing.freeze(model)
    return model, [freezing]


def training_folder(cfg: DictConfig) -> Path:
    """Return the folder of this training, or of the training that wrote the checkpoint."""
    return Path(cfg.run_dir) if "resume" in cfg else Path(cfg.checkpoint).resolve().parent.parent


def configured_callbacks(cfg: DictConfig, has_loggers: bool) -> list[pl.Callback]:
    """Build the config's callbacks, except those that the Trainer refuses or that do nothing."""
    is_used = {
        # An evaluation reads its run's config, but saves nothing.
        pl.callbacks.Checkpoint: "resume" in cfg,
        pl.callbacks.ProgressBar: cfg.trainer.enable_progress_bar,
        pl.callbacks.LearningRateMonitor: has_loggers,
    }
    unused = tuple(kind for kind in is_used if not is_used[kind])
    built: list[pl.Callback] = [make(node) for node in cfg.callbacks.values() if node]
    callbacks = [callback for callback in built if not isinstance(callback, unused)]
    bars = [callback for callback in callbacks if isinstance(callback, pl.callbacks.ProgressBar)]
    if len(bars) > 1:  # the user's progress bar replaces the library's
        callbacks = [c for c in callbacks if not (c in bars and is_library_class(c))]
    for callback in callbacks:
        # Several checkpoints need different names. With one name, only the last would remain.
        if isinstance(callback, pl.callbacks.ModelCheckpoint) and callback.save_top_k not in (0, 1):
            name = callback.filename or "best"
            callback.filename = name if "{" in name else name + "-{epoch}-{step}"
    return callbacks


def is_library_class(callback: pl.Callback) -> bool:
    """Return whether this library defines the class of a callback."""
    return type(callback).__module__.partition(".")[0] == "harness"
