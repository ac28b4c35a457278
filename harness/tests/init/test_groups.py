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


class Module(pl.LightningModule):
    """Norms of one axis and of two, an inner part, a part beside the network."""

    def __init__(self) -> None:
        super().__init__()
        layers = {"conv": nn.Conv2d(1, 4, 3), "bn": nn.BatchNorm2d(4), "fc": nn.Linear(4, 2)}
        self.net = nn.ModuleDict({**layers, "norm": nn.LayerNorm([2, 2])})
        self.probe = nn.Linear(2, 2)


def test_the_inner_part_counts() -> None:
    module = Module()
    module.net.fc.requires_grad_(False)  # is in a group all the same
    groups = parameter_groups(module, 1.0, {"net": 0.5, "net.fc": 2.0})
    rates = [(id(p), group["lr"]) for group in groups for p in group["params"]]
    expected = {"net.fc": 2.0, "net": 0.5, "probe": 1.0}
    assert sorted(rates) == sorted(
        (id(p), next(rate for part, rate in expected.items() if name.startswith(part)))
        for name, p in module.named_parameters()
    )


def test_norms_biases_and_vectors_do_not_decay_when_asked() -> None:
    module = Module()
    groups = parameter_groups(module, 1.0, decay_norms=False)
    decay = {id(p): group.get("weight_decay") for group in groups for p in group["params"]}
    without = {name for name, p in module.named_parameters() if decay[id(p)] == 0}
    with_decay = {"net.conv.weight", "net.fc.weight", "probe.weight"}
    assert without == {name for name, _ in module.named_parameters()} - with_decay


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_set_rates_keep_the_groups_factors(name: str) -> None:
    bound: Any = {"total_steps": 10} if name == "OneCycleLR" else {"base_lr": 0.01}
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    kind = partial(getattr(torch.optim.lr_scheduler, name), max_lr=0.1, **bound)
    groups = {"lr_factors": {"net": 0.25}}
    built = harness.build_optimizers(Module(), optimizer, kind, groups=groups)
    for _ in range(9):
        net, rest = (group["lr"] for group in built["optimizer"].param_groups)
        assert net == pytest.approx(0.25 * rest)
        built["optimizer"].step()
        built["lr_scheduler"]["scheduler"].step()


def test_what_makes_no_groups_is_refused() -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    for values, said in (
        (
            {"lr_factors": {"net.haed": 0.1}},
            "no part is named net.haed. Did you mean net.head?",
        ),
        ({"lr_factors": {"net": 0}}, r"init.freeze=\[net\]"),
    ):
        with pytest.raises(UserError, match=said):
            harness.build_optimizers(FineTuned(), optimizer, groups=values)
    with pytest.raises(UserError, match="groups multiply the optimizer"):
        harness.build_optimizers(
            FineTuned(), lambda p: torch.optim.SGD(p, lr=0.1), groups={"decay_norms": False}
        )
