"""Every kind of checkpoint that the converter knows is one to start from."""

import copy
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from harness.convert import load
from harness.init.settings import Init
from harness.init.weights import start_from
from tests_harness.convert.checkpoint_matrix import CASES, outcome, same


class Module(pl.LightningModule):
    """What trains a network, with a part beside it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.probe = net, nn.Linear(3, 3)


def emptied(network: nn.Module) -> nn.Module:
    """The network with zeros for weights; buffers that repeat an element cannot be written to."""
    for name, buffer in network.named_buffers():
        if 0 in buffer.stride():
            network.register_buffer(name, buffer.clone(memory_format=torch.contiguous_format))
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.zero_()
    return network


@pytest.mark.parametrize("name", CASES)
def test_a_module_starts_from_it_equal_by_bit(name: str, tmp_path: Path) -> None:
    path, network = CASES[name](tmp_path)
    expected = copy.deepcopy(network.state_dict())
    module = Module(emptied(network))
    probe = module.probe.weight.clone()
    started = start_from(module, Init(path=str(path)))
    wrong = [key for key, value in network.state_dict().items() if not same(value, expected[key])]
    assert wrong == []
    assert torch.equal(probe, module.probe.weight)
    num = len(network.state_dict())
    assert started.rows["fits"] == f"{num} of {num} tensors of net"
    assert sum(line.startswith("took net.") for line in started.lines) == num


@pytest.mark.parametrize("name", CASES)
def test_load_gives_what_convert_writes(name: str, tmp_path: Path) -> None:
    path, network = CASES[name](tmp_path)
    assert outcome(load, path, network) == "yes"


def test_raw_weights_instead_of_the_average(tmp_path: Path) -> None:
    path, network = CASES["ema_beside_state_dict"](tmp_path)
    averaged = copy.deepcopy(network.state_dict())
    module = Module(network)
    started = start_from(module, Init(path=str(path)))
    assert "init.ema=false takes that" in started.rows["note"]
    start_from(module, Init(path=str(path), ema=False))
    assert not torch.equal(network.state_dict()["conv.weight"], averaged["conv.weight"])


def test_load_takes_memory_once_for_weights_that_are_shared(tmp_path: Path) -> None:
    path, _ = CASES["tied_weights"](tmp_path)
    state = load(path)
    assert state["embedding.weight"].data_ptr() == state["head.weight"].data_ptr()
