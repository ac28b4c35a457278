"""Inputs are split by sample and outputs joined by sample, or an error refuses the call."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from harness.errors import UserError
from harness.strategies.ddp2 import DDP2Strategy
from harness.strategies.dp import DataParallelStrategy
from harness.strategies.splitting import join, split
from tests.strategies.parity import UPSTREAM_WARNINGS, Batches, Module, trainer

pytestmark = UPSTREAM_WARNINGS
CPU, META = torch.device("cpu"), torch.device("meta")
TWO = [CPU, CPU]
Pair = namedtuple("Pair", "left right")
Record = dataclasses.make_dataclass("Record", ["image", "name"], frozen=True)


def test_samples_are_dealt_as_torch_chunk_deals_them():
    for num_samples, num_devices, sizes in (
        (30, 2, [15, 15]),
        (9, 8, [2, 2, 2, 2, 1]),
        (2, 4, [1, 1]),
    ):
        x = torch.arange(num_samples)
        shares = split({"x": x}, [CPU] * num_devices, [num_samples])
        assert [size for _, size in shares] == [len(share["x"]) for share, _ in shares] == sizes
        assert torch.equal(torch.cat([share["x"] for share, _ in shares]), x)


def test_only_the_first_device_sees_the_callers_memory():
    x, scale = torch.zeros(4), torch.zeros(1)
    (first, _), (second, _) = split({"x": x, "scale": scale}, TWO, [4])
    for tensor in second.values():
        tensor += 1
    first["x"].add_(2)
    assert x.tolist() == [2, 2, 0, 0]
    assert scale.tolist() == [0]


def test_nested_inputs_keep_their_types():
    x = torch.arange(4)
    nest = {
        "pair": Pair(x, [x]),
        "record": Record(x, "kept"),
        "ordered": OrderedDict(a=x),
        "default": defaultdict(list, a=x),
        "rest": (None, 3, "text", torch.float32, len),
    }
    half = split({"nest": nest}, TWO, [4])[1][0]["nest"]
    assert torch.equal(half["pair"].right[0], x[2:])
    assert torch.equal(half["record"].image, x[2:])
    assert half["record"].name == "kept"
    assert isinstance(half["ordered"], OrderedDict)
    assert half["default"]["new"] == []
    assert half["rest"] == nest["rest"]


def test_what_is_the_same_for_all_samples_goes_to_every_device():
    numbers = ([7, 8], (1, 2, 3), [[0.5]])  # not one per sample
    call = {"row": torch.ones(1, 4), "scalar": torch.tensor(3), "numbers": numbers}
    for share, size in split(call | {"x": torch.arange(4)}, TWO, [4]):
        assert torch.equal(share["row"], call["row"])
        assert share["scalar"] == 3
        assert len(share["x"]) == size == 2
        assert share["numbers"] == numbers


def test_the_rows_of_a_call_are_those_of_the_batch_or_several_views_of_it():
    for rows, batch_sizes, sizes in (
        ([8], [8], [4, 4]),
        ([24], [8], [12, 12]),  # three views in one tensor
        ([1, 4], [8, 4], [2, 2]),  # of the second loader
        ([1], [8], [1]),  # nothing has rows
        ([0], [8], [1]),
    ):
        call = {str(i): torch.ones(n, 3) for i, n in enumerate(rows)}
        assert [size for _, size in split(call, TWO, batch_sizes)] == sizes


def test_joined_outputs_are_in_the_order_of_the_samples():
    parts = [{"a": Pair(torch.arange(3), "name")}, {"a": Pair(torch.arange(3, 5), "name")}]
    joined = join(parts, [3, 2])
    assert torch.equal(joined["a"].left, torch.arange(5))
    assert joined["a"].right == "name"
    means = [torch.tensor(1.0), torch.tensor(2.0)]
    assert join(means, [3, 1], "mean") == 1.25


def test_what_was_moved_to_the_cpu_stays_there():
    """The lengths that `pack_padded_sequence` takes; what forward returns of them as well."""
    x, lengths = torch.ones(4, 3, device=META), torch.arange(4)
    for share, _ in split({"x": x, "lengths": lengths}, [META, META], [4]):
        assert [argument.device for argument in share.values()] == [META, CPU]
    assert join([torch.ones(2), torch.ones(2)], [2, 2]).device == CPU
    assert join([x[:2], x[2:]], [2, 2]).device == META


def test_an_argument_that_cannot_be_split_is_refused():
    for argument, words in (
        (torch.eye(3), "extra of forward() has shape (3, 3); the batch has 4 samples"),
        (torch.ones(8, 2), "whole_inputs=[extra], or use strategy=ddp."),  # views
        ({"lengths": [3, 1, 2, 2]}, "a list of one value per sample"),
        (np.zeros((4, 2)), "holds a ndarray, which cannot be split"),
        (iter([1, 2]), "list_iterator"),
        (pack_sequence([torch.ones(2)] * 4), "PackedSequence, which cannot be split by sample"),
        (nn.Linear(1, 1), "Linear"),
        (SimpleNamespace(nodes=torch.ones(4)), "SimpleNamespace"),
        ({"deep": [torch.ones(4), torch.ones(5)]}, "shape (5,)"),
    ):
        call = {"x": torch.ones(4), "extra": argument}
        with pytest.raises(UserError) as error:
            split(call, TWO, [4])
        assert words in str(error.value)
        assert len(split(call, TWO, [4], whole=["extra"])) == 2
    for x in (torch.ones(5, 8), torch.ones(9, 2)):  # time first, a selection of the samples
        with pytest.raises(UserError, match="the batch has 8 samples"):
            split({"x": x}, TWO, [8])


def test_outputs_that_are_not_per_sample_are_refused():
    packed = [pack_sequence([torch.ones(length)] * 2) for length in (2, 3)]
    for outputs, words in (
        ([torch.ones(2), None], "NoneType and Tensor"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], "differ in structure"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "scalar_outputs=mean"),
        ([torch.ones(2, 5), torch.ones(3, 5)], "shapes (2, 5), (3, 5) for [2, 2] samples"),
        (["a", "b"], "str values that differ"),
        ([torch.ones(2, 7, 3), torch.ones(2, 5, 3)], "pad with total_length=x.shape[1]"),
        (packed, "PackedSequence values that differ"),
        ([torch.distributions.Normal(torch.ones(2), 1) for _ in TWO], "Normal values"),
    ):
        with pytest.raises(UserError) as error:
            join(outputs, [2, 2])
        assert words in str(error.value)


class CallsNetDirectly(Module):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()


def test_a_module_that_cannot_be_split_is_refused():
    for module, strategy, words in (
        (CallsNetDirectly(), DataParallelStrategy(), "self(...), so only cpu would"),
        (Module(), DDP2Strategy(modules=["nett"]), "Module has no nett. Use some of net"),
    ):
        with pytest.raises(UserError) as error:
            trainer(strategy).fit(module, Batches(24, 24, 24))
        assert words in str(error.value)
