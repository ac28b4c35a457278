from typing import Any

import pytest
import torch

from project.models.resnet import ResNet

SMALL = {"num_classes": 5, "layers": (1, 1, 1, 1), "width": 16}


# The numbers of parameters are those of torchvision's resnet18 and resnet50.
@pytest.mark.parametrize(
    ("block", "layers", "num_parameters", "last"),
    [
        ("basic", (2, 2, 2, 2), 11_689_512, "layer4.1.bn2"),
        ("bottleneck", (3, 4, 6, 3), 25_557_032, "layer4.2.bn3"),
    ],
)
def test_names_and_sizes_are_those_of_torchvision(
    block: Any, layers: tuple[int, ...], num_parameters: int, last: str
) -> None:
    with torch.device("meta"):
        net = ResNet(num_classes=1000, norm="batch", block=block, layers=layers)
    assert sum(p.numel() for p in net.parameters()) == num_parameters
    names = list(net.state_dict())
    assert names[:6] == [
        "conv1.weight",
        *(f"bn1.{n}" for n in ("weight", "bias", "running_mean", "running_var")),
        "bn1.num_batches_tracked",
    ]
    assert names[-3:] == [f"{last}.num_batches_tracked", "fc.weight", "fc.bias"]
    assert "layer2.0.downsample.0.weight" in names
    assert "layer2.0.downsample.1.running_var" in names
    has_first = "layer1.0.downsample.0.weight" in names
    assert has_first == (block == "bottleneck")
    assert net.layer2[0].conv2.stride == ((2, 2) if block == "bottleneck" else (1, 1))


@pytest.mark.parametrize("block", ["basic", "bottleneck"])
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("stem", ["image", "small"])
def test_every_kind_maps_images_to_logits(block: Any, norm: Any, stem: Any) -> None:
    net = ResNet(**SMALL, in_channels=1, block=block, norm=norm, stem=stem)
    logits = net(torch.randn(3, 1, 32, 32))
    assert logits.shape == (3, 5)
    logits.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_few_channels_are_kept_in_torchs_own_order() -> None:
    """With channels_last, oneDNN would write past its memory; see the class."""
    net = ResNet(num_classes=5, layers=(1, 1, 1, 1), width=8)
    assert net.layer1[0].conv1.weight.is_contiguous()


def test_an_image_is_judged_alone() -> None:
    """With groups, what else is in a batch does not matter: it may be split between devices."""
    net = ResNet(**SMALL).double().train()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert torch.allclose(net(images)[1:2], net(images[1:2]), atol=1e-10)


@pytest.mark.parametrize("setting", [{"block": "wide"}, {"norm": "layer"}, {"stem": "big"}])
def test_wrong_setting_is_named(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        ResNet(num_classes=2, **setting)
