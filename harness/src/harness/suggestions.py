"""Suggest a name that is close to one that does not exist."""

import difflib
from collections.abc import Iterable

# Names that users type for the keys of configs.
SYNONYMS = {"learning_rate": "lr", "epochs": "max_epochs", "steps": "max_steps"}
# Keys and choices of lightning-hydra-template that are no key or choice here, and what replaces
# them. They are looked up only if a project has no such key or file.
REPLACED = {
    "callbacks=default": "Leave it out: checkpoints and the progress bar are always on. For early "
    "stopping, use callbacks=early_stopping.",
    "callbacks=model_checkpoint": "Leave it out: checkpoints are always on, and objective= selects "
    "the best one.",
    "callbacks.model_checkpoint": "Use objective=<metric> and mode=<mode> in its place.",
    "ckpt_path": "Use resume=<run> to resume, init=<file> to start from its weights, or python "
    "evaluate.py checkpoint=<run>.",
    "debug=default": "Use debug=fast_dev_run.",
    "debug=fdr": "Use debug=fast_dev_run.",
    "debug=limit": "Use +trainer.limit_train_batches=<fraction> and the other limits.",
    "debug=profiler": "Use debug=profile.",
    "extras": "Leave it out.",
    "hparams_search": "Use -m sweep=optuna, with sweep.params in the experiment.",
    "hydra": "Leave it out.",
    "logger=csv": "Leave it out: metrics.csv is always written.",
    "logger=many_loggers": "Use logger=[wandb,mlflow].",
    "logger=tensorboard": "Leave it out: TensorBoard's events are always written.",
    "logger.aim": "Leave it out, or use logger=wandb or logger=mlflow.",
    "optimized_metric": "Use objective=<metric>.",
    "paths": "Leave it out. A file's path is relative to the folder where you type the command.",
    "task_name": "Use name=<name>.",
    "train": "To test alone, use python evaluate.py checkpoint=<run>.",
    "trainer=cpu": "Use strategy=cpu.",
    "trainer=ddp": "Use strategy=ddp trainer.devices=<number>.",
    "trainer=ddp_sim": "Use strategy=ddp trainer.accelerator=cpu trainer.devices=<number>.",
    "trainer=gpu": "Use strategy=gpu.",
    "trainer=mps": "Use strategy=auto.",
}


def suggest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return " Did you mean ...?" with a synonym or a similar name among ``names``, or ``""``."""
    candidates = list(names)
    synonyms = [candidate for candidate in candidates if candidate == SYNONYMS.get(name)]
    close = synonyms or difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{close[0]}?" if close else ""


def replacement(name: str) -> str:
    """Return the text of ``REPLACED`` for a key, the key above it, or a choice; else ``""``."""
    keys = (name, ".".join(name.split(".")[:2]), name.partition(".")[0])
    return next((f" {REPLACED[key]}" for key in keys if key in REPLACED), "")
