"""Learning rates per part and by depth, weight decay without norms: groups of an optimizer."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

import harness
from harness.errors import UserError
from harness.groups import layers, parameter_groups
from harness.optimizers import with_rates_of_groups
from tests.faults.run_folder import contents, differences, leave_at
from tests.init.modules import FineTuned
from tests.init.test_freezing import train
from tests.strategy_runs import run_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.Linear(width, width)


class Transformer(nn.Module):
    """Registered as timm's and Hugging Face's are."""

    def __init__(self, num_blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.patch_embed = nn.Linear(4, width)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)


class Residual(nn.Module):
    """Registered as torchvision's are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        self.fc = nn.Linear(4, 2)


class Module(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.probe = net, nn.Linear(2, 2)


def rates(groups: list[dict[str, Any]], module: nn.Module) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {names[id(p)]: group["lr"] for group in groups for p in group["params"]}


def test_layers_follow_the_order_of_registration() -> None:
    found = dict(layers(Module(Transformer())))
    blocks = [f"net.encoder.layer.{i}" for i in range(3)]
    assert list(found) == ["net.patch_embed", *blocks, "net.head", "probe"]
    assert found["net.patch_embed"][-1] == "net.cls_token"
    assert found["net.encoder.layer.2"][-2:] == ["net.norm.weight", "net.norm.bias"]
    found = dict(layers(Residual()))
    assert list(found) == ["conv1", "layer1.0", "layer1.1", "fc"]
    assert found["conv1"] == ["conv1.weight", "bn1.weight", "bn1.bias"]


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


def test_rates_decay_from_the_last_layer_to_the_first_that_has_a_weight() -> None:
    module = Transformer(width=4)
    found = rates(parameter_groups(module, 0.1, layer_decay=0.5), module)
    assert found["head.weight"] == 0.1
    assert found["encoder.layer.2.attention.weight"] == 0.05
    assert found["encoder.layer.0.norm.bias"] == 0.0125
    assert found["cls_token"] == found["patch_embed.weight"] == 0.00625


def test_norms_biases_and_vectors_do_not_decay_when_asked() -> None:
    module = Module(Residual())
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = parameter_groups(module, 1.0, decay_norms=False)
    without, others = sorted(groups, key=lambda group: "weight_decay" not in group)
    assert without["weight_decay"] == 0
    assert {names[id(p)].rpartition(".")[2] for p in others["params"]} == {"weight"}
    assert {p.ndim for p in without["params"]} == {1}
    assert "net.bn1.weight" in {names[id(p)] for p in without["params"]}


def test_without_a_setting_the_optimizer_is_what_it_was() -> None:
    module = FineTuned()
    settings = {"lr_factors": None, "layer_decay": None, "decay_norms": True}
    built = harness.build_optimizers(module, torch.optim.SGD, groups=settings)
    (group,) = built.param_groups
    plain = torch.optim.SGD(module.parameters()).param_groups[0]
    assert group.keys() == plain.keys()
    assert [*map(id, group["params"])] == [*map(id, plain["params"])]


def test_schedulers_that_set_rates_keep_the_groups_factors() -> None:
    for name, bound in {
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
        "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1},
    }.items():
        groups = parameter_groups(Module(Residual()), 0.1, {"net": 0.25})
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        kind = partial(getattr(torch.optim.lr_scheduler, name), **bound)
        scheduler = with_rates_of_groups(kind, optimizer)(optimizer)
        for _ in range(9):
            net, rest = (group["lr"] for group in optimizer.param_groups)
            assert net == pytest.approx(0.25 * rest)
            optimizer.step()
            scheduler.step()


def test_what_makes_no_groups_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"layer_decay": 0}, "layer_decay=0 must be more than 0 and at most 1"),
        ({"lr_factors": {"net.haed": 0.1}}, "there is no net.haed. Did you mean net.head?"),
        ({"lr_factors": {"net": 0}}, "init.freeze=[net] does not train it"),
        ({"decay": False}, "groups: there is no decay. Use lr_factors, layer_decay, decay_norms."),
    ]
    for values, said in refused:
        with pytest.raises(UserError) as caught:
            harness.build_optimizers(FineTuned(), partial(torch.optim.SGD, lr=0.1), groups=values)
        assert said in str(caught.value)
    with pytest.raises(UserError, match="set its lr"):
        harness.build_optimizers(
            FineTuned(), lambda p: torch.optim.SGD(p, lr=0.1), groups={"layer_decay": 0.5}
        )


def test_a_run_goes_on_with_its_groups(tmp_path: Path) -> None:
    run_dir = train(tmp_path)
    expected = contents(run_dir)
    leave_at(run_dir, 7)
    run_of([f"resume={run_dir}"], "cpu", tmp_path)
    assert differences(expected, contents(run_dir)) == []
