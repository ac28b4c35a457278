"""Refusals of fsdp; ``tests/examples/test_fsdp.py`` tests that it trains as one process."""

from typing import Any

import pytest
import torch
from torch import nn

from harness.errors import UserError
from harness.parity.combine_values import RankCombiner
from harness.strategies.fsdp import FSDPStrategy
from harness.training.attachments import Attachments
from tests.strategies.parity import UPSTREAM_WARNINGS, Batches, Module, trainer
from tests.strategy_runs import NO_FSDP

pytestmark = [
    *UPSTREAM_WARNINGS,
    pytest.mark.skipif(NO_FSDP, reason="this torch has no fsdp on CPUs"),
]


class Tied(Module):
    """Has one matrix in two blocks, which torch would make two of."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8)) for _ in range(2)]
        blocks[1][0].weight = blocks[0][0].weight
        self.net = nn.Sequential(*blocks, nn.Linear(8, 5))


def test_a_parameter_that_two_units_share_is_refused() -> None:
    with pytest.raises(UserError, match="would untie a parameter"):
        trainer(FSDPStrategy(), devices=1).fit(Tied(), Batches(24))
    trainer(FSDPStrategy(modules=[]), devices=1).fit(Tied(), Batches(24))


class Norms(Module):
    """Logs the norm of its gradients, which are split, as users do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [
            parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None
        ]
        self.log("norm", torch.stack(norms).norm())


def test_a_split_value_is_logged_whole() -> None:
    fitted = trainer(FSDPStrategy(), [Attachments(), RankCombiner()], devices=1)
    fitted.fit(Norms(), Batches(24))
    assert type(fitted.callback_metrics["norm"]) is torch.Tensor
    assert fitted.callback_metrics["norm"] > 0
