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
from harness.strategies.ddp2 import DDP2Strategy
from harness.strategies.dp import DataParallelStrategy
from harness.strategies.replicable import check_devices, check_module
from harness.strategies.splitting import join, split
from tests.strategies.parity import BATCH_NORM, Case, Module, loader
from tests.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS
CPU = torch.device("cpu")
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}


def trainer(strategy, **kwargs):
    quiet = dict.fromkeys(["enable_progress_bar", "enable_model_summary", "logger"], False)
    kwargs = {"accelerator": "cpu", "devices": 2, "max_steps": 2} | quiet | kwargs
    kwargs |= {"enable_checkpointing": False, "use_distributed_sampler": False}
    return pl.Trainer(strategy=strategy, **kwargs)


ONE_OF_TWO = TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
LAUNCHES = [
    (DataParallelStrategy, {"num_nodes": 2}, {}, ["trainer.num_nodes=2", "strategy=ddp2"]),
    (
        DataParallelStrategy,
        {},
        ONE_OF_TWO,
        ["one process, but 2", "--nproc-per-node=1", "strategy=ddp"],
    ),
    (DataParallelStrategy, {"sync_batchnorm": True}, {}, ["strategy=dp", "sync_batchnorm"]),
    (DDP2Strategy, {"sync_batchnorm": True}, {}, ["strategy=ddp2", "trainer.sync_batchnorm"]),
    (DDP2Strategy, {"num_nodes": 2}, {}, ["MASTER_ADDR is not set", "wait for each other"]),
    (  # Lightning lets it pass
        DDP2Strategy,
        {"num_nodes": 2},
        ONE_OF_TWO,
        ["2 were started on this node", "--nproc-per-node=1"],
    ),
]


def test_a_wrong_launch_is_refused_before_training():
    for strategy, settings, environment, words in LAUNCHES:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(UserError) as error:
                trainer(strategy(), **settings)
        assert all(word in str(error.value) for word in words), str(error.value)


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


def compiled_as_a_whole():
    module = Module(Case())
    module.compile(backend="eager")
    return module


MODULES = [
    (lambda: CallsNetDirectly(Case()), {}, ["never called self(...)", "modules=[net]"]),
    (lambda: Module(Case()), {"modules": ["nett"]}, ["names nett", "It has: net."]),
    (lambda: Returns(torch.sum), {}, ["a scalar", "scalar_outputs=mean"]),
    (lambda: Returns(lambda y: y.T), {}, ["shapes (5, 12), (5, 12) for [12, 12] samples"]),
    (lambda: Returns(lambda y: y.flatten()), {}, ["dimension 0 is not the batch"]),
    (lambda: Returns(lambda y: torch.distributions.Normal(y, 1)), {}, ["Normal values"]),
    (lambda: Returns(lambda y: float(y.detach().mean())), {}, ["float values"]),
    (
        lambda: Module(Case(network=lambda: nn.SyncBatchNorm(8))),
        {},
        ["net is a SyncBatchNorm", "strategy=ddp"],
    ),
    (
        lambda: Module(Case(network=lambda: nn.LazyLinear(5))),
        {},
        ["net.weight is lazy", "configure_model"],
    ),
    (compiled_as_a_whole, {}, ["compiled", "self.net.compile()"]),
]


def test_a_module_that_cannot_be_split_is_refused():
    for i, (make_module, options, words) in enumerate(MODULES):
        strategy = (DataParallelStrategy, DDP2Strategy)[i % 2]
        with pytest.raises(UserError) as error:
            trainer(strategy(**options)).fit(make_module(), loader(24, 24, 24))
        assert all(word in str(error.value) for word in words), str(error.value)


def test_an_argument_that_cannot_be_split_is_refused():
    for argument, words in (
        (torch.eye(3), ["shape (3, 3)", "4 samples", "whole_inputs"]),
        (["a", "b", "c", "d"], ["one string per sample"]),
        ([3, 1, 2, 2], ["one number per sample", "Pass tensors"]),
        (np.zeros((4, 2)), ["ndarray", "cannot be split"]),
        (iter([1, 2]), ["list_iterator"]),
        (pack_sequence([torch.ones(2)] * 4), ["PackedSequence", "cannot be split by sample"]),
        (nn.Linear(1, 1), ["Linear"]),
        (SimpleNamespace(nodes=torch.ones(4)), ["SimpleNamespace"]),
        ({"deep": [torch.ones(4), torch.ones(5)]}, ["shape (5,)"]),
    ):
        for args, kwargs, label in (
            ((torch.ones(4), argument), {}, "Argument 2 of forward()"),
            ((torch.ones(4),), {"extra": argument}, "forward(extra=…)"),
        ):
            with pytest.raises(UserError) as error:
                split(args, kwargs, [CPU, CPU])
            assert all(word in str(error.value) for word in [label, *words]), str(error.value)


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


def test_a_module_that_cannot_be_copied_is_refused():
    far = nn.Linear(1, 1)
    far.register_buffer("far", torch.empty(1, device="meta"))
    for check, words in (
        (lambda: check_module(torch.jit.ScriptModule()), "ScriptModule is a TorchScript module"),
        (lambda: check_devices(far, [CPU, CPU]), "far is on meta"),
        (lambda: DataParallelStrategy(scalar_outputs="sum"), "=sum is unknown: error or mean"),
    ):
        with pytest.raises(UserError, match=words):
            check()


def test_a_share_of_one_sample_makes_batch_norm_say_so():
    """As in ddp; the note tells which device it was."""
    with pytest.raises(ValueError, match="more than 1 value per channel") as error:
        trainer(DataParallelStrategy()).fit(Module(BATCH_NORM), loader(3))
    if hasattr(error.value, "__notes__"):
        assert error.value.__notes__ == ["Raised in replica 1 on cpu."]
