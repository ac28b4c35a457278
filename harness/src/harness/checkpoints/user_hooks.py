"""Find hooks of the user that act when an epoch starts or the training ends.

Next: ``safe_point`` calls the hooks of an epoch's start again on resume, and saves the last
checkpoint after the hooks of the training's end.
"""

import pytorch_lightning as pl
from pytorch_lightning import callbacks
from pytorch_lightning.utilities.model_helpers import is_overridden

from harness.compat import callbacks_of
from harness.kinds import FRAMEWORKS, package
from harness.sharded import full_tensor


def begins_epochs(callback: pl.Callback) -> bool:
    """Return whether a resume inside an epoch must call ``on_train_epoch_start`` again.

    A subclass of Lightning's ``BaseFinetuning`` that does not define the hook must not run it
    again: Lightning's hook would add the parameters to the optimizer a second time.
    """
    lightning = callbacks.GradientAccumulationScheduler, callbacks.StochasticWeightAveraging
    hook = type(callback).on_train_epoch_start
    seeds = getattr(callback, "seeds_hooks", False)
    return seeds or isinstance(callback, lightning) or package(hook) not in FRAMEWORKS


def changes_weights_at_end(trainer: pl.Trainer) -> bool:
    """Return whether an ``on_train_end`` hook may set weights that the last checkpoint must hold.

    With Lightning's ``WeightAveraging`` it returns ``False``, because checkpoints hold the raw and
    the averaged weights.
    """
    found = callbacks_of(trainer)
    hooks = [type(callback).on_train_end for callback in found]
    is_changed = any(package(hook) not in FRAMEWORKS for hook in hooks) or any(
        isinstance(callback, callbacks.StochasticWeightAveraging) for callback in found
    )
    is_changed |= is_overridden("on_train_end", trainer.lightning_module)
    return is_changed and not any(isinstance(c, callbacks.WeightAveraging) for c in found)


def norms(module: pl.LightningModule) -> dict[str, float]:
    """Return the norm of each floating-point parameter and buffer, by name."""
    tensors = {n: t.detach() for n, t in module.state_dict(keep_vars=True).items()}
    return {n: float(full_tensor(t.norm())) for n, t in tensors.items() if t.is_floating_point()}
