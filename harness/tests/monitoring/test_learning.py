"""A run that cannot learn stops after its first epoch, with a line."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.errors import TrainingError, UserError
from harness.monitoring.learning import Learning

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")


class Module(pl.LightningModule):
    """A linear layer, whose loss is as ``kind`` says."""

    def __init__(self, kind: str, rate: float = 0.1) -> None:
        super().__init__()
        self.head, self.in_list = nn.Linear(4, 1), [nn.Linear(4, 1)]
        self.kind, self.rate = kind, rate

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        losses = {
            "right": self.head(batch).mean(),
            "none": None,
            "of a layer in a list": self.in_list[0](batch).mean(),
            "vector": self.head(batch),
        }
        return losses[self.kind]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


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


def test_run_that_learns_or_is_not_to_learn_goes_on() -> None:
    assert fit(Module("right")) == 2
    assert fit(Module("right", rate=0.0)) == 2
    assert fit(Module("none"), map(list, ())) == 2  # a stream without a batch


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [
        ("none", TrainingError, r"Module\.training_step returned no loss in the firs"),
        (
            "of a layer in a list",
            TrainingError,
            r"of 0.1.\nThe optimizer trains head.weight, head.bias. (.|\n)*layers of a list",
        ),
        ("vector", ValueError, r"training_step returned a loss of shape \(4, 1\)"),
    ],
)
def test_epoch_that_teaches_nothing_stops_the_run_and_says_why(
    kind: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        fit(Module(kind))


def test_an_optimizer_over_another_module_is_refused() -> None:
    module, other = Module("right"), Module("right")
    module.configure_optimizers = other.configure_optimizers  # type: ignore[method-assign]
    with pytest.raises(
        UserError, match=r"over parameters of another module(.|\n)*self\.parameters"
    ):
        fit(module)
