"""The library attaches a known list to a Trainer and its module, and removes it all."""

from typing import Any

import pytest
import pytorch_lightning as pl

from harness.parity.parity_callback import ParityChecks
from tests.modules.classifiers import Classifier
from tests.modules.data import Data
from tests.workers.trainer import small_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")


class Attached(pl.Callback):
    """Notes what module, strategy and connector have in place of Lightning's own."""

    def __init__(self) -> None:
        self.during: dict[str, set[str]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.during = attached(trainer, module)


def attached(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, set[str]]:
    strategy: Any = trainer.strategy
    replaced = {name for name in vars(strategy) if callable(getattr(type(strategy), name, None))}
    return {
        "strategy": replaced,
        "module": vars(module).keys() & {*dir(pl.LightningModule)} - {*vars(pl.LightningModule())},
        "connector": {type(trainer._logger_connector).__name__},
    }


def test_a_fit_leaves_module_and_strategy_as_they_were() -> None:
    seen, module = Attached(), Classifier()
    trainer = small_trainer(
        1, ParityChecks(), seen, accumulate_grad_batches=2, max_epochs=1, precision="64-true"
    )
    before = attached(trainer, module)
    trainer.fit(module, Data("Flowers"))
    assert seen.during["strategy"] >= {"on_train_batch_start"}
    assert seen.during["module"] == {"log"}
    assert seen.during["connector"] == {"FinalValues"}
    assert attached(trainer, module) == before
