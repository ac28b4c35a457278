"""Every misuse has its own message, which names what to change."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from harness.errors import UserError
from harness.exact.global_batches import GlobalBatches
from harness.strategies.ddp2 import DDP2Strategy
from harness.strategies.dp import DataParallelStrategy
from harness.strategies.splitting import join, split
from tests.strategies.parity import BATCH_NORM, Batches, Case, Module
from tests.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS
CPU = torch.device("cpu")


def trainer(strategy, **kwargs):
    quiet = dict.fromkeys(["enable_progress_bar", "enable_model_summary", "logger"], False)
    kwargs = {"accelerator": "cpu", "devices": 2, "max_steps": 2} | quiet | kwargs
    kwargs["callbacks"] = [GlobalBatches(seed=0), *kwargs.get("callbacks", ())]
    kwargs |= {"enable_checkpointing": False, "use_distributed_sampler": False}
    return pl.Trainer(strategy=strategy, **kwargs)


class CallsNetDirectly(Module):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()


class Returns(Module):
    """forward returns what it is told to make of the logits."""

    def __init__(self, make: Callable) -> None:
        super().__init__(Case())
        self.make = make

    def forward(self, x):
        return self.make(self.net(x))


MODULES = [
    (lambda: CallsNetDirectly(Case()), {}, ["never called self(...)", "modules=[net]"]),
    (lambda: Module(Case()), {"modules": ["nett"]}, ["names nett", "It has: net."]),
    (lambda: Returns(torch.sum), {}, ["a scalar", "scalar_outputs=mean"]),
    (lambda: Returns(lambda y: y.T), {}, ["shapes (5, 12), (5, 12) for [12, 12] samples"]),
    (lambda: Returns(lambda y: y.flatten()), {}, ["returned shapes (60,), (60,)", "one row per"]),
    (lambda: Returns(lambda y: torch.distributions.Normal(y, 1)), {}, ["Normal values"]),
    (lambda: Returns(lambda y: float(y.detach().mean())), {}, ["float values"]),
]


def test_a_module_that_cannot_be_split_is_refused():
    for i, (make_module, options, words) in enumerate(MODULES):
        strategy = (DataParallelStrategy, DDP2Strategy)[i % 2]
        with pytest.raises(UserError) as error:
            trainer(strategy(**options)).fit(make_module(), Batches(24, 24, 24))
        assert all(word in str(error.value) for word in words), str(error.value)


def test_an_argument_that_cannot_be_split_is_refused():
    for argument, words in (
        (torch.eye(3), ["extra of forward() has shape (3, 3); the batch has 4 samples"]),
        (torch.ones(8, 2), ["has shape (8, 2)", "whole_inputs=[extra]", "strategy=ddp"]),  # views
        (["a", "b", "c", "d"], ["a list of one value per sample"]),
        ({"lengths": [3, 1, 2, 2]}, ["a list of one value per sample", "Pass tensors"]),
        (np.zeros((4, 2)), ["holds a ndarray", "cannot be split"]),
        (iter([1, 2]), ["list_iterator"]),
        (pack_sequence([torch.ones(2)] * 4), ["PackedSequence", "cannot be split by sample"]),
        (nn.Linear(1, 1), ["Linear"]),
        (SimpleNamespace(nodes=torch.ones(4)), ["SimpleNamespace"]),
        ({"deep": [torch.ones(4), torch.ones(5)]}, ["shape (5,)"]),
    ):
        call = {"x": torch.ones(4), "extra": argument}
        with pytest.raises(UserError) as error:
            split(call, [CPU, CPU], [4])
        assert all(word in str(error.value) for word in words), str(error.value)
        assert len(split(call, [CPU, CPU], [4], whole=["extra"])) == 2


def test_a_call_without_the_rows_of_the_batch_is_refused():
    """Time first, nodes, a selection of the samples: no number tells how these are to be split."""
    for x in (torch.ones(5, 8), torch.ones(9, 2)):
        with pytest.raises(UserError, match="the batch has 8 samples"):
            split({"x": x}, [CPU, CPU], [8])


def test_outputs_that_are_not_per_sample_are_refused():
    packed = [pack_sequence([torch.ones(length)] * 2) for length in (2, 3)]
    for outputs, words in (
        ([torch.ones(2), None], ["NoneType and Tensor"]),
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], ["unequal"]),
        ([[torch.ones(2)], [torch.ones(2)] * 2], ["unequal"]),
        ([torch.tensor(1.0), torch.tensor(2.0)], ["scalar"]),
        ([torch.ones(2, 5), torch.ones(3, 5)], ["shapes (2, 5), (3, 5) for [2, 2] samples"]),
        (["a", "b"], ["str values that differ"]),
        (
            [torch.ones(2, 7, 3), torch.ones(2, 5, 3)],
            ["shapes (2, 7, 3), (2, 5, 3)", "total_length=x.shape[1]"],
        ),
        (packed, ["PackedSequence values that differ"]),
    ):
        with pytest.raises(UserError) as error:
            join(outputs, [2, 2])
        assert all(word in str(error.value) for word in words), str(error.value)


def test_a_share_of_one_sample_makes_batch_norm_say_so():
    """As in ddp."""
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        trainer(DataParallelStrategy()).fit(Module(BATCH_NORM), Batches(3))
