import torch

from project.models.cnn import CNN
from project.models.mlp import MLP


def test_networks_map_a_batch_to_logits() -> None:
    images = torch.randn(2, 3, 8, 8)
    assert CNN(in_channels=3, channels=[8, 16], num_classes=5)(images).shape == (2, 5)
    assert MLP(in_features=3 * 64, hidden=[8], num_classes=5, dropout=0.1)(images).shape == (2, 5)


def test_samples_of_cnn_do_not_influence_each_other() -> None:
    """No statistics over the batch: how it is split between devices cannot matter."""
    net = CNN(in_channels=1, channels=[8, 16], num_classes=5)
    images = torch.randn(6, 1, 8, 8)
    assert torch.allclose(net(images)[:2], net(images[:2]), atol=1e-6)
