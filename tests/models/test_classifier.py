from functools import partial
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from project.models.classifier import Classifier
from project.models.mlp import MLP


def classifier(**kwargs) -> Classifier:
    net = MLP(in_features=4, hidden=[8], num_classes=3)
    return Classifier(net, partial(SGD, lr=0.1), num_classes=3, **kwargs)


def test_loss_weights_are_buffers() -> None:
    """They move with the module; a plain tensor would stay on the CPU."""
    model = classifier(class_weights=[1.0, 2.0, 3.0])
    assert "class_weights" in dict(model.named_buffers())
    assert model.double().class_weights.dtype == torch.float64


def test_label_smoothing_reaches_the_loss() -> None:
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    expected = nn.functional.cross_entropy(logits, labels, label_smoothing=0.3)
    assert torch.equal(classifier(label_smoothing=0.3).loss(logits, labels), expected)


def test_evaluation_loss_is_the_training_loss() -> None:
    """Over several batches of unequal size and weight, it is the loss of all samples."""
    model = classifier(class_weights=[1.0, 2.0, 3.0])
    inputs, labels = torch.randn(10, 4), torch.randint(0, 3, (10,))
    for part in (slice(0, 7), slice(7, 10)):
        model.validation_step((inputs[part], labels[part]), 0)
    expected = model.loss(model(inputs), labels)
    assert torch.isclose(model.val_loss.compute(), expected, atol=1e-6)


def test_samples_without_a_label_count_nowhere() -> None:
    inputs, labels = torch.randn(6, 4), torch.tensor([0, -1, 2, -1, 1, -1])
    model = classifier(ignore_index=-1, class_weights=[1.0, 2.0, 3.0])
    never = SimpleNamespace(accumulate_grad_batches=1, log_every_n_steps=1000, global_step=0)
    model._trainer = never
    loss = model.training_step((inputs, labels), 0)
    assert torch.isclose(loss, model.loss(model(inputs[::2]), labels[::2]))
    for batch in ((inputs, labels), (inputs[1::2], labels[1::2])):  # the second has no label at all
        outputs = model.validation_step(batch, 0)
    assert len(outputs["labels"]) == 0
    assert torch.isclose(model.val_loss.compute(), loss)


@pytest.mark.parametrize(
    ("scheduler", "kind"),
    [
        (partial(OneCycleLR, max_lr=0.1), OneCycleLR),
        (partial(OneCycleLR, max_lr=0.1, total_steps=7), OneCycleLR),
        (partial(StepLR, step_size=1), StepLR),
        (ReduceLROnPlateau, ReduceLROnPlateau),
    ],
)
def test_scheduler_is_built(scheduler, kind) -> None:
    model = classifier(scheduler=scheduler, scheduler_interval="epoch")
    model._trainer = SimpleNamespace(estimated_stepping_batches=50)
    configured = model.configure_optimizers()["lr_scheduler"]
    assert configured["interval"] == "epoch"
    built = configured["scheduler"]
    assert isinstance(built, kind)
    if kind is OneCycleLR:
        assert built.total_steps == (scheduler.keywords.get("total_steps") or 50)


def test_prediction_has_a_row_per_sample() -> None:
    columns = classifier().predict_step((torch.randn(5, 4), torch.zeros(5).long()), 0)
    assert set(columns) == {"label", "prediction", "confidence", "p0", "p1", "p2"}
    assert all(column.shape == (5,) for column in columns.values())


def test_hyper_parameters_are_plain() -> None:
    hyper_parameters = dict(classifier(class_weights=[1.0, 1.0, 1.0]).hparams)
    assert hyper_parameters == {
        "num_classes": 3,
        "class_weights": [1.0, 1.0, 1.0],
        "label_smoothing": 0.0,
        "ignore_index": None,
    }
    assert isinstance(classifier(), pl.LightningModule)
