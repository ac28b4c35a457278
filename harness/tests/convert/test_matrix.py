"""Each of 44 kinds of checkpoints arrives strictly and bit for bit, whatever takes it."""

import copy
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from harness.convert import load
from harness.init.settings import Init
from harness.init.weights import start_from

from .checkpoint_matrix import KINDS, differing, read_again, same

Made = dict[str, tuple[Path, nn.Module]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint of each kind, and the network that holds the expected weights."""
    return {name: kind.make(tmp_path_factory.mktemp(name)) for name, kind in KINDS.items()}


class Module(pl.LightningModule):
    """A module that trains a network, with another layer beside it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.probe = net, nn.Linear(3, 3)


def emptied(network: nn.Module) -> nn.Module:
    """A copy with zeros for weights; buffers that repeat an element cannot be written to."""
    network = copy.deepcopy(network)
    for name, buffer in network.named_buffers():
        if 0 in buffer.stride():
            network.register_buffer(name, buffer.clone(memory_format=torch.contiguous_format))
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.zero_()
    return network


@pytest.mark.parametrize("way", ["load", ".pt", ".safetensors"])
def test_the_bare_network_takes_the_weights_strictly(way: str, checkpoints: Made) -> None:
    assert len(checkpoints) == 44
    for name, (path, network) in checkpoints.items():
        if (name, way) == ("odd_tensors", ".safetensors"):  # complex128 has no place there
            continue
        state = load(path) if way == "load" else read_again(path, way)
        assert differing(state, network.state_dict()) == [], name
        emptied(network).load_state_dict(state, strict=True)


def test_a_module_starts_from_each_of_them(checkpoints: Made) -> None:
    for name, (path, network) in checkpoints.items():
        expected = network.state_dict()
        module = Module(emptied(network))
        probe = module.probe.weight.clone()
        rows, lines = start_from(module, Init(path=str(path)))
        assert differing(module.net.state_dict(), expected) == [], name
        assert torch.equal(probe, module.probe.weight)
        assert rows["fits"] == f"{len(expected)} of the {len(expected)} tensors of net", name
        assert sum(line.startswith("loaded net.") for line in lines) == len(expected)


@pytest.mark.parametrize("name", ["weight_averaging", "ema_beside_state_dict", "ema_submodule"])
def test_the_raw_weights_can_be_had_instead_of_the_average(name: str, checkpoints: Made) -> None:
    path, averaged = checkpoints[name]
    raw = load(path, ema=False)
    assert raw.keys() == averaged.state_dict().keys()
    assert not torch.equal(raw["conv.weight"], averaged.conv.weight)
    module = Module(copy.deepcopy(averaged))
    assert "init.ema=false chooses " in start_from(module, Init(path=str(path)))[0]["note"]
    start_from(module, Init(path=str(path), ema=False))
    assert same(module.net.conv.weight.detach(), raw["conv.weight"])
