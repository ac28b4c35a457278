from functools import partial

import torch
from torch import nn
from torch.optim import SGD

from project.models.classifier import Classifier
from project.models.mlp import MLP


def classifier(**kwargs) -> Classifier:
    net = MLP(in_features=4, hidden=[8], num_classes=3)
    return Classifier(net, partial(SGD, lr=0.1), num_classes=3, **kwargs)


def test_loss_weights_are_buffers_and_hyper_parameters_are_plain() -> None:
    """Buffers move with the module; a plain tensor would stay on the CPU."""
    model = classifier(class_weights=[1.0, 2.0, 3.0])
    assert "class_weights" in dict(model.named_buffers())
    settings = {"num_classes": 3, "class_weights": [1.0, 2.0, 3.0], "label_smoothing": 0.0}
    assert dict(model.hparams) == settings


def test_evaluation_loss_is_the_training_loss() -> None:
    """Over several batches of unequal size and weight, it is the loss of all samples."""
    model = classifier(class_weights=[1.0, 2.0, 3.0], label_smoothing=0.3)
    model.log_dict = lambda *_, **__: None
    inputs, labels = torch.randn(10, 4), torch.randint(0, 3, (10,))
    for part in (slice(0, 7), slice(7, 10)):
        model.validation_step((inputs[part], labels[part]), 0)
    how = {"weight": model.class_weights, "label_smoothing": 0.3}
    expected = nn.functional.cross_entropy(model(inputs), labels, **how)
    assert torch.isclose(model.val_loss.compute(), expected, atol=1e-6)
