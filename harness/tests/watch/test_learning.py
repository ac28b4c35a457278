"""A run that cannot learn stops after its first epoch, with a line."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.errors import TrainingError
from harness.watch.learning import Learning

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")


class Module(pl.LightningModule):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.head, self.rate = nn.Linear(4, 1), rate

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.head(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Forgetful(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.head(batch).mean()


class PlainList(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 1)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.layers[0](batch).mean()


class Vector(Module):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.head(batch)


def fit(module: Module, loader: Any = None) -> int:
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[Learning()],
        logger=False,
        max_epochs=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader or DataLoader(torch.ones(8, 4), 4))
    return trainer.current_epoch


def test_epoch_that_teaches_nothing_stops_the_run_and_names_what_the_optimizer_has() -> None:
    assert fit(Module()) == 2
    assert fit(Module(rate=0.0)) == 2
    with pytest.raises(
        TrainingError, match=r"Forgetful\.training_step returned no loss in the firs"
    ):
        fit(Forgetful())
    says = r"rate of 0.1. The optimizer has head.weight, head.bias: .*\nLayers in a plain list or"
    with pytest.raises(TrainingError, match=says):
        fit(PlainList())


def test_a_stream_without_a_batch_is_not_said_to_have_no_loss() -> None:
    assert fit(Module(), map(list, ())) == 2


def test_no_loss_is_told_long_before_the_epoch_ends(caplog: pytest.LogCaptureFixture) -> None:
    module, trainer = Forgetful(), pl.Trainer(logger=False, enable_checkpointing=False)
    watch = Learning()
    watch.on_train_start(trainer, module)
    for batch_idx in range(100):
        watch.on_train_batch_end(trainer, module, None, None, batch_idx)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["training_step has returned no loss in 50 batches."]


def test_loss_of_several_numbers_is_refused_with_its_shape() -> None:
    with pytest.raises(ValueError, match=r"training_step returned a loss of shape \(4, 1\)"):
        fit(Vector())
