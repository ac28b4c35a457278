"""Of what a file holds, the weights are taken whole or not at all."""

from pathlib import Path

import pytest
import torch
from torch import nn

from harness.convert import CheckpointError, convert

from .checkpoint_matrix import same


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def taken(root: object, folder: Path, **options: object) -> dict[str, torch.Tensor]:
    torch.save(root, folder / "in.ckpt")
    convert(folder / "in.ckpt", folder / "out.pt", force=True, **options)
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.ones(2)},
        [torch.ones(1), torch.ones(2)],
        {"deep": [({"a": torch.ones(1)},)]},
        nn.Linear(2, 2),
        {"a": torch.eye(2).to_sparse()},
    ],
    ids=["dict", "list", "deep", "module", "sparse"],
)
def test_tensors_are_not_left_behind(other: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weights in it others; --key weights takes those"):
        taken({"step": torch.tensor(5), "weights": other}, tmp_path)
    with pytest.raises(CheckpointError, match=r"--key model\.weights takes those"):
        taken({"model": {"step": torch.tensor(5), "weights": other}}, tmp_path)
    assert not (tmp_path / "out.pt").exists()


def test_what_holds_no_tensor_is_left_behind(tmp_path: Path) -> None:
    root = {"a": torch.ones(1), "names": [["x"]], "set": {1}, "none": None}
    assert taken(root, tmp_path).keys() == {"a"}


@pytest.mark.parametrize("raw", ["model", "anything"])
def test_an_average_without_buffers_is_not_the_weights(raw: str, tmp_path: Path) -> None:
    net, average = network(), dict(network().named_parameters())
    state = taken({raw: net.state_dict(), "ema": average}, tmp_path)
    assert all(same(state[name], value) for name, value in net.state_dict().items())
    holder = {"decay": torch.tensor(0.9), "shadow": network().state_dict()}
    state = taken({raw: net.state_dict(), "ema": holder}, tmp_path)
    assert all(same(state[name], value) for name, value in net.state_dict().items())
    whole = {f"module.{name}": value for name, value in network().state_dict().items()}
    state = taken({raw: net.state_dict(), "ema": whole}, tmp_path)
    assert all(same(state[name], whole[f"module.{name}"]) for name in net.state_dict())


def test_a_result_without_tensors_is_refused(tmp_path: Path) -> None:
    state = {"net.w": torch.ones(2), "net.b._extra_state": {"a": 1}}
    root = {"state_dict": state, "pytorch-lightning_version": "2"}
    with pytest.raises(CheckpointError, match="holds no tensor"):
        taken(root, tmp_path, prefix="net.b")
    assert not (tmp_path / "out.pt").exists()


def test_two_modules_are_not_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="name it with --key"):
        taken({"first": network().state_dict(), "second": network()}, tmp_path)


class OwnParallel(nn.DataParallel):
    pass


class OwnAverage(torch.optim.swa_utils.AveragedModel):
    pass


class OnlyModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


@pytest.mark.parametrize("wrapper", [OwnParallel, OwnAverage])
def test_a_class_derived_from_a_wrapper_is_one(wrapper: type, tmp_path: Path) -> None:
    net = network()
    net.load_state_dict(taken(wrapper(net), tmp_path))
    only = OnlyModule()
    only.load_state_dict(taken(wrapper(only), tmp_path))
    assert taken(only, tmp_path).keys() == {"module.weight", "module.bias"}


class OwnDict(dict):
    pass


def test_a_dict_of_another_class_is_a_dict(tmp_path: Path) -> None:
    state = OwnDict(network().state_dict())
    for root in (state, OwnDict(state_dict=state), {"model": state}):
        assert taken(root, tmp_path).keys() == state.keys()
    assert taken({"a": {"b": state}}, tmp_path, key="a.b").keys() == state.keys()
