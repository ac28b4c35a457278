"""Learning rates per part and by depth, weight decay without norms: groups of an optimizer."""

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

import harness
from harness.errors import UserError
from harness.groups import layers, parameter_groups
from tests.init.modules import FineTuned


class Transformer(nn.Module):
    """Registered as timm's and Hugging Face's are."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.patch_embed = nn.Linear(4, 8)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 2)


class Residual(nn.Module):
    """Registered as torchvision's are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        self.fc, self.norm = nn.Linear(4, 2), nn.LayerNorm([2, 2])


class Module(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.probe = net, nn.Linear(2, 2)


def rates(groups: list[dict[str, Any]], module: nn.Module) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {names[id(p)]: group["lr"] for group in groups for p in group["params"]}


def test_layers_follow_the_order_of_registration() -> None:
    depths = layers(Module(Transformer()))
    assert depths["net.cls_token"] == depths["net.patch_embed.weight"] == 0
    assert [depths[f"net.encoder.layer.{i}.linear1.bias"] for i in range(3)] == [1, 2, 3]
    assert depths["net.norm.bias"] == 3
    assert (depths["net.head.weight"], depths["probe.weight"]) == (4, 5)
    depths = layers(Residual())
    assert depths["conv1.weight"] == depths["bn1.weight"] == 0
    assert [depths[f"{name}.bias"] for name in ("layer1.0", "layer1.1", "fc")] == [1, 2, 3]


def test_the_inner_part_counts_and_factors_multiply_with_depth() -> None:
    module = Module(Transformer())
    module.net.patch_embed.requires_grad_(False)  # is in a group all the same
    parts = {"net": 0.5, "net.head": 2.0}
    groups = parameter_groups(module, 1.0, parts)
    given = [id(p) for group in groups for p in group["params"]]
    assert sorted(given) == sorted(id(p) for p in module.parameters())
    found = rates(groups, module)
    assert (found["net.head.weight"], found["net.norm.bias"], found["probe.bias"]) == (2, 0.5, 1)
    found = rates(parameter_groups(module, 1.0, parts, layer_decay=0.5), module)
    assert (found["net.head.weight"], found["net.norm.bias"], found["probe.bias"]) == (1, 0.125, 1)
    assert found["net.cls_token"] == 0.5**6


def test_norms_biases_and_vectors_do_not_decay_when_asked() -> None:
    module = Module(Residual())
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = parameter_groups(module, 1.0, decay_norms=False)
    without, others = sorted(groups, key=lambda group: "weight_decay" not in group)
    assert without["weight_decay"] == 0
    assert {names[id(p)].rpartition(".")[2] for p in others["params"]} == {"weight"}
    norms = {"net.bn1.weight", "net.norm.weight"}
    assert norms <= {names[id(p)] for p in without["params"]}
    assert all(p.ndim > 1 for p in others["params"])


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_set_rates_keep_the_groups_factors(name: str) -> None:
    bound: dict[str, Any] = {
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
    }[name]
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    kind = partial(getattr(torch.optim.lr_scheduler, name), **bound)
    groups = {"lr_factors": {"net": 0.25}}
    built = harness.build_optimizers(Module(Residual()), optimizer, kind, groups=groups)
    for _ in range(9):
        net, rest = (group["lr"] for group in built["optimizer"].param_groups)
        assert net == pytest.approx(0.25 * rest)
        built["optimizer"].step()
        built["lr_scheduler"]["scheduler"].step()


def test_what_makes_no_groups_is_refused() -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    for values, said in (
        ({"layer_decay": 0}, "layer_decay=0 must be more than 0 and at most 1"),
        ({"lr_factors": {"net.haed": 0.1}}, "there is no net.haed. Did you mean net.head?"),
        ({"lr_factors": {"net": 0}}, r"init.freeze=\[net\]"),
    ):
        with pytest.raises(UserError, match=said):
            harness.build_optimizers(FineTuned(), optimizer, groups=values)
    with pytest.raises(UserError, match="set its lr"):
        harness.build_optimizers(
            FineTuned(), lambda p: torch.optim.SGD(p, lr=0.1), groups={"layer_decay": 0.5}
        )
