"""Which steps and loaders a module and its data have, and what a run does without them."""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.model_helpers import is_overridden

from harness.errors import UserError
from harness.processes.launch import global_rank
from harness.run.hints import described

log = logging.getLogger(__name__)


def check_training(model: pl.LightningModule, data: pl.LightningDataModule | None) -> None:
    """Refuse to train without a loader.

    Raises:
        UserError: with what to write.
    """
    source = data or model
    if not is_overridden("train_dataloader", source):
        more = "; or choose data=<name>" if data is None else ""
        takes = "data=null takes the model's own loaders: " if data is None else ""
        raise UserError(
            f"{takes}{type(source).__name__} has no train_dataloader.\nWrite one in it{more}."
        )


def no_test(model: pl.LightningModule, data: pl.LightningDataModule | None) -> str | None:
    """What a test would lack."""
    for owner, method in ((model, "test_step"), (data or model, "test_dataloader")):
        if not is_overridden(method, owner):
            return f"{type(owner).__name__} has no {method}"
    return None


def check_test(model: pl.LightningModule, data: pl.LightningDataModule | None) -> None:
    """Refuse to evaluate without a test.

    Raises:
        UserError: with what is missing.
    """
    if missing := no_test(model, data):
        raise UserError(f"There is nothing to evaluate: {missing}. Write one.")


def choose_prediction_loader(
    model: pl.LightningModule, data: pl.LightningDataModule | None
) -> None:
    """Let a module or data module that has no loader to predict on take its test's.

    Raises:
        UserError: if it has no test loader either.
    """
    source: Any = data or model
    name = type(source).__name__
    has_own = is_overridden("predict_dataloader", source)
    if not has_own and not is_overridden("test_dataloader", source):
        raise UserError(
            f"{name} has neither a predict_dataloader nor a test_dataloader: there is nothing to "
            f"predict.\nWrite in {name}: def predict_dataloader(self): return DataLoader(...)"
        )
    if not has_own and global_rank() == 0:
        log.warning("Predicting on the test loader: %s has no predict_dataloader.", name)
    if not has_own:  # a partial, and no function defined here: spawned processes get it by pickle
        source.predict_dataloader = partial(test_loader, source)


def test_loader(source: Any) -> Any:
    """The test loader of a module or a data module, whose data sets ``setup`` may make."""
    source.setup("test")
    return source.test_dataloader()


@contextmanager
def explaining_forward(model: pl.LightningModule) -> Iterator[None]:
    """Say what to write where Lightning's own ``predict_step`` calls a forward that refuses.

    Raises:
        UserError: with the class and the method that it lacks.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError) as error:
        code = pl.LightningModule.predict_step.__code__
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        steps = [frame for frame in frames if frame.f_code is code]
        if not steps:
            raise
        name, batch = type(model).__name__, described(steps[0].f_locals.get("batch"))
        raise UserError(
            f"{name} has no predict_step, and its forward does not take the batch as it is "
            f"({batch}).\nWrite in {name}: def predict_step(self, batch, batch_idx): "
            "return self(batch[0])"
        ) from error
