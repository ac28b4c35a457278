import torch

from project.models.cnn import CNN


def test_cnn_maps_a_batch_to_logits() -> None:
    assert CNN(in_channels=3, channels=[8, 16], num_classes=5)(torch.randn(2, 3, 9, 9)).shape == (
        2,
        5,
    )


def test_samples_do_not_influence_each_other() -> None:
    """No statistics over the batch: how it is split between devices cannot matter."""
    net = CNN(in_channels=1, channels=[8, 16], num_classes=5)
    images = torch.randn(6, 1, 8, 8)
    assert torch.allclose(net(images)[:2], net(images[:2]), atol=1e-6)
