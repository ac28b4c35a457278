"""Learning rates per part, weight decay without norms: groups of an optimizer."""

from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

import harness
from harness.errors import UserError
from harness.optimizers import parameter_groups
from tests.init.modules import FineTuned


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


def test_the_inner_part_counts() -> None:
    module = Module(Residual())
    module.net.fc.requires_grad_(False)  # is in a group all the same
    groups = parameter_groups(module, 1.0, {"net": 0.5, "net.fc": 2.0})
    given = [id(p) for group in groups for p in group["params"]]
    assert sorted(given) == sorted(id(p) for p in module.parameters())
    found = rates(groups, module)
    assert (found["net.fc.weight"], found["net.norm.bias"], found["probe.bias"]) == (2, 0.5, 1)


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
        ({"lr_factors": {"net.haed": 0.1}}, "there is no net.haed. Did you mean net.head?"),
        ({"lr_factors": {"net": 0}}, r"init.freeze=\[net\]"),
    ):
        with pytest.raises(UserError, match=said):
            harness.build_optimizers(FineTuned(), optimizer, groups=values)
    with pytest.raises(UserError, match="set its lr"):
        harness.build_optimizers(
            FineTuned(), lambda p: torch.optim.SGD(p, lr=0.1), groups={"decay_norms": False}
        )
