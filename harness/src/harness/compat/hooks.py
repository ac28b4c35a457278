"""Intercept Lightning's calls of the user's methods, but not the user's own calls.

If the user's calls were intercepted, a loader that a user's hook requests would become a loader of
the run. Nothing is attached to the user's objects, so they can be copied. If a version of Lightning
calls the methods in another way, ``harness/tests/parity/test_loaders_of_hooks.py`` fails.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl

Request = Callable[[], Any]
# By strategy: the names of the hooks that ``run_last`` has replaced.
LAST = WeakKeyDictionary[Any, set[str]]()


def around_hooks(
    trainer: pl.Trainer,
    objects: Sequence[pl.LightningModule | pl.LightningDataModule],
    hooks: Sequence[str],
    context: Callable[[pl.Trainer], AbstractContextManager[None]],
) -> None:
    """Enter a context manager around some hooks of the module or data module.

    Lightning calls each hook in a context of its profiler. The context's name identifies the hook.
    """
    kinds = ("LightningModule", "LightningDataModule")
    bases = [kinds[isinstance(item, pl.LightningDataModule)] for item in objects]
    names = {
        f"[{base}]{type(item).__name__}.{hook}"
        for base, item in zip(bases, objects, strict=True)
        for hook in hooks
    }
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # set untyped
    profile = profiler.profile

    @contextmanager
    def both(action_name: str) -> Iterator[None]:
        with profile(action_name), context(trainer):
            yield

    profiler.profile = lambda name: both(name) if name in names else profile(name)


def run_last(trainer: pl.Trainer, hook: str, function: Callable[..., None]) -> None:
    """Call a function after a hook of all callbacks, the module and the strategy.

    Lightning calls the strategy's hook last, so the function runs at the end of this hook, with the
    same arguments. Several functions run in the order in which they were added.
    """
    strategy: Any = trainer.strategy
    earlier = getattr(strategy, hook)

    def both(*args: Any) -> None:
        earlier(*args)
        function(*args)

    vars(strategy)[hook] = both
    LAST.setdefault(strategy, set()).add(hook)


def restore_hooks(trainer: pl.Trainer) -> None:
    """Restore the strategy's own hooks."""
    for hook in LAST.pop(trainer.strategy, ()):
        vars(trainer.strategy).pop(hook, None)


def on_request(trainer: pl.Trainer, make: Callable[[Any, str, Request], Any]) -> None:
    """Call ``make`` for each loader that Lightning requests from the module or data module.

    ``make`` gets the module or data module, the name of its method, and a function that calls it.
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
