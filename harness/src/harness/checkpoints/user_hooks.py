"""Finds what hooks of the user do at the start of an epoch and at the end of training.

Next: ``safe_point`` calls the first ones again on resume, and saves after the second ones.
"""

import pytorch_lightning as pl
from pytorch_lightning import callbacks
from pytorch_lightning.utilities.model_helpers import is_overridden

from harness.compat import callbacks_of
from harness.kinds import FRAMEWORKS, package
from harness.sharded import full_tensor


def begins_epochs(callback: pl.Callback) -> bool:
    """Return whether a callback's hook at an epoch's start must run again on resume inside one.

    A subclass of Lightning's ``BaseFinetuning`` that does not define that hook must not: it would
    give the optimizer its parameters a second time.
    """
    stock = callbacks.GradientAccumulationScheduler, callbacks.StochasticWeightAveraging
    hook = type(callback).on_train_epoch_start
    seeds = getattr(callback, "seeds_hooks", False)
    return seeds or isinstance(callback, stock) or package(hook) not in FRAMEWORKS


def changes_weights_at_end(trainer: pl.Trainer) -> bool:
    """Return whether a hook at the end of training may set weights that are to be saved.

    Of Lightning's ``WeightAveraging`` checkpoints hold both weights already.
    """
    found = callbacks_of(trainer)
    hooks = [type(callback).on_train_end for callback in found]
    is_changed = any(package(hook) not in FRAMEWORKS for hook in hooks) or any(
        isinstance(callback, callbacks.StochasticWeightAveraging) for callback in found
    )
    is_changed |= is_overridden("on_train_end", trainer.lightning_module)
    return is_changed and not any(isinstance(c, callbacks.WeightAveraging) for c in found)


def norms(module: pl.LightningModule) -> dict[str, float]:
    """Return the norm of each parameter and buffer of real numbers."""
    tensors = {n: t.detach() for n, t in module.state_dict(keep_vars=True).items()}
    return {n: float(full_tensor(t.norm())) for n, t in tensors.items() if t.is_floating_point()}
