"""Gets between Lightning and the methods of the user's that it calls.

Without it the user's own calls could not be told from Lightning's: a loader that a hook asks for
would be a loader of the run. Objects of the user carry nothing of it, and can be copied.
``harness/tests/upstream/test_hooks.py`` fails where Lightning asks in another way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl

Make = Callable[[], Any]
LAST = WeakKeyDictionary[Any, set[str]]()  # hooks of a strategy that ``run_last`` has replaced


def around_hooks(
    trainer: pl.Trainer,
    owners: Sequence[pl.LightningModule | pl.LightningDataModule],
    hooks: Sequence[str],
    context: Callable[[pl.Trainer], AbstractContextManager[None]],
) -> None:
    """Enter a context while Lightning calls some hooks of its module or data module.

    Lightning calls each hook in a context of its profiler, which has a name.
    """
    kinds = ("LightningModule", "LightningDataModule")
    bases = [kinds[isinstance(owner, pl.LightningDataModule)] for owner in owners]
    named = {
        f"[{base}]{type(owner).__name__}.{hook}"
        for base, owner in zip(bases, owners, strict=True)
        for hook in hooks
    }
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # set untyped
    profile = profiler.profile

    @contextmanager
    def both(action_name: str) -> Iterator[None]:
        with profile(action_name), context(trainer):
            yield

    profiler.profile = lambda name: both(name) if name in named else profile(name)


def run_last(trainer: pl.Trainer, hook: str, function: Callable[..., None]) -> None:
    """Call a function after all callbacks, the module and the strategy have had a hook.

    The function gets the arguments of the strategy's hook, which Lightning calls last. Several
    functions are called in the order in which they were given.
    """
    strategy: Any = trainer.strategy
    earlier = getattr(strategy, hook)

    def both(*args: Any) -> None:
        earlier(*args)
        function(*args)

    vars(strategy)[hook] = both
    LAST.setdefault(strategy, set()).add(hook)


def restore_hooks(trainer: pl.Trainer) -> None:
    """Give the strategy its own hooks back."""
    for hook in LAST.pop(trainer.strategy, ()):
        vars(trainer.strategy).pop(hook, None)


def on_request(trainer: pl.Trainer, make: Callable[[Any, str, Make], Any]) -> None:
    """Make the loaders that Lightning asks module or data module for, and no others.

    ``make`` gets the owner, the method's name, and what Lightning would do.
    """
    fit: Any = trainer.fit_loop
    evaluations = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in (fit, fit.epoch_loop.val_loop, *evaluations):
        source = loop._data_source
        vars(source).pop("dataloader", None)
        if source.is_module():
            vars(source)["dataloader"] = partial(
                make, source.instance, source.name, source.dataloader
            )
