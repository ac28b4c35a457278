from pathlib import Path

import torch

from harness import train
from project.models.cnn import CNN
from project.models.mlp import MLP


def test_every_parameter_of_mlp_gets_a_gradient() -> None:
    net = MLP(in_features=12, hidden=[8], num_classes=5)
    net(torch.randn(4, 12)).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_mlp_learns(tmp_path: Path) -> None:
    """The config's network, for two epochs of a task that a guess gets right once in ten times."""
    words = ("strategy=cpu", "trainer.max_epochs=2", "trainer.enable_progress_bar=false")
    run = train("data=synthetic", "model=mlp", *words, f"output_dir={tmp_path}")
    assert run.results["test/accuracy"] > 0.5


def test_cnn_maps_a_batch_to_logits() -> None:
    assert CNN(in_channels=3, channels=[8, 16], num_classes=5)(torch.randn(2, 3, 9, 9)).shape == (
        2,
        5,
    )


def test_samples_of_cnn_do_not_influence_each_other() -> None:
    """No statistics over the batch: how it is split between devices cannot matter."""
    net = CNN(in_channels=1, channels=[8, 16], num_classes=5)
    images = torch.randn(6, 1, 8, 8)
    assert torch.allclose(net(images)[:2], net(images[:2]), atol=1e-6)
