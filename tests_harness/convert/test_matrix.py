from pathlib import Path

import pytest
import torch

from harness.convert import convert

from .checkpoint_matrix import CASES, converted, outcome, same


@pytest.mark.parametrize("name", CASES)
def test_loads_strict_and_bit_equal_into_the_bare_network(name: str, tmp_path: Path) -> None:
    path, network = CASES[name](tmp_path)
    assert outcome(converted, path, network) == "yes"


@pytest.mark.parametrize("name", [name for name in CASES if "odd_tensors" not in name])
def test_safetensors_holds_the_same_bits(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path, network = CASES[name](tmp_path)
    convert(path, tmp_path / "out.safetensors")
    state = load_file(tmp_path / "out.safetensors")
    assert state.keys() == network.state_dict().keys()
    assert all(same(state[key], value) for key, value in network.state_dict().items())


@pytest.mark.parametrize("name", ["weight_averaging", "ema_beside_state_dict", "ema_submodule"])
def test_the_raw_weights_can_be_had_too(name: str, tmp_path: Path) -> None:
    path, averaged = CASES[name](tmp_path)
    convert(path, tmp_path / "out.pt", ema=False)
    raw = torch.load(tmp_path / "out.pt")
    assert raw.keys() == averaged.state_dict().keys()
    assert not torch.equal(raw["conv.weight"], averaged.conv.weight)


def test_there_are_at_least_thirty_cases() -> None:
    assert len(CASES) >= 30
