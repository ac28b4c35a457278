"""Each of 44 kinds of checkpoints arrives strictly and bit for bit, whatever takes it."""

import copy
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file
from torch import nn

from harness.convert import convert, load
from harness.init.settings import Init
from harness.init.weights import start_from

from .checkpoint_matrix import CASES, check, converted, same

Made = dict[str, tuple[Path, nn.Module]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint of each kind, and the network that holds the expected weights."""
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in CASES.items()}


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


def test_convert_and_load_give_what_the_bare_network_takes_strictly(checkpoints: Made) -> None:
    assert len(checkpoints) == 44
    for path, network in checkpoints.values():
        check(converted, path, copy.deepcopy(network))
        check(load, path, copy.deepcopy(network))


def test_safetensors_holds_the_same_bits(checkpoints: Made, tmp_path: Path) -> None:
    for name, (path, network) in checkpoints.items():
        if "odd_tensors" in name:  # complex128 has no place there
            continue
        convert(path, tmp_path / "out.safetensors", force=True)
        state, expected = load_file(tmp_path / "out.safetensors"), network.state_dict()
        assert state.keys() == expected.keys(), name
        assert all(same(state[key], value) for key, value in expected.items()), name


def test_a_module_starts_from_each_of_them(checkpoints: Made) -> None:
    for name, (path, network) in checkpoints.items():
        expected = network.state_dict()
        module = Module(emptied(copy.deepcopy(network)))
        probe = module.probe.weight.clone()
        rows, lines = start_from(module, Init(path=str(path)))
        found = module.net.state_dict()
        assert all(same(found[key], value) for key, value in expected.items()), name
        assert torch.equal(probe, module.probe.weight)
        assert rows["fits"] == f"{len(expected)} of the {len(expected)} tensors of net", name
        assert sum(line.startswith("took net.") for line in lines) == len(expected)


def test_the_raw_weights_can_be_had_instead_of_the_average(checkpoints: Made) -> None:
    for name in ("weight_averaging", "ema_beside_state_dict", "ema_submodule"):
        path, averaged = checkpoints[name]
        raw = load(path, ema=False)
        assert raw.keys() == averaged.state_dict().keys()
        assert not torch.equal(raw["conv.weight"], averaged.conv.weight)
        module = Module(copy.deepcopy(averaged))
        assert "init.ema=false takes " in start_from(module, Init(path=str(path)))[0]["note"]
        start_from(module, Init(path=str(path), ema=False))
        assert same(module.net.conv.weight.detach(), raw["conv.weight"])
