from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD

from harness import train
from project.models.mlp import MLP
from project.models.regressor import Regressor


@pytest.fixture
def model() -> Regressor:
    net = MLP(in_features=4, hidden=[8], num_classes=1)
    regressor = Regressor(net, nn.MSELoss(), partial(SGD, lr=0.1))
    data = SimpleNamespace(facts={"target_mean": 100.0, "target_std": 5.0})
    regressor._trainer = SimpleNamespace(datamodule=data)
    regressor.on_fit_start()
    return regressor


def test_loss_is_in_deviations_of_the_targets(model: Regressor) -> None:
    numbers, targets = torch.zeros(2), torch.tensor([105.0, 90.0])
    assert model.scaled_loss(numbers, targets) == pytest.approx((1 + 4) / 2)


def test_targets_may_be_a_column(model: Regressor) -> None:
    """A target of shape (B, 1) against numbers of shape (B,) must not be compared with all."""
    inputs, targets = torch.randn(5, 4), torch.randn(5)
    numbers = model(inputs)
    assert numbers.shape == (5,)
    column = model.scaled_loss(numbers, targets.unsqueeze(1))
    assert torch.equal(column, model.scaled_loss(numbers, targets))


def test_predictions_are_in_units_and_need_no_targets(model: Regressor) -> None:
    inputs = torch.randn(5, 4)
    alone = model.predict_step(inputs, 0)
    assert set(alone) == {"prediction"}
    assert torch.equal(alone["prediction"], 100 + 5 * model(inputs))
    assert set(model.predict_step([inputs, torch.zeros(5)], 0)) == {"target", "prediction"}


def test_objective_and_pictures_come_with_the_model(make_cfg) -> None:
    numbers, classes = make_cfg("model=regressor"), make_cfg("model=mlp")
    assert (numbers.objective, numbers.mode) == ("val/loss", "min")
    assert (classes.objective, classes.mode) == ("val/accuracy", "max")
    assert classes.callbacks.checkpoint.monitor == "val/accuracy"
    pictures = set(classes.callbacks) - set(numbers.callbacks)
    assert pictures == {"confusion_matrix"}
    chosen = make_cfg("model=mlp", "objective=val/f1", "callbacks.confusion_matrix=null")
    assert chosen.callbacks.checkpoint.monitor == "val/f1"
    assert chosen.callbacks.confusion_matrix is None


def test_regressor_learns(tmp_path: Path) -> None:
    """Better than the mean of all patients, which is 58 off on average."""
    words = ("strategy=cpu", "trainer.max_epochs=10", "trainer.enable_progress_bar=false")
    run = train("experiment=table", *words, f"output_dir={tmp_path}")
    assert run.results["test/mae"] < 55
    assert "val/accuracy" not in run.results
