"""Of what a file holds, the weights are taken whole or not at all."""

import re
import shlex
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.convert import CheckpointError, Report, convert

from .checkpoint_matrix import same


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def taken(root: object, folder: Path, **options: object) -> dict[str, torch.Tensor]:
    torch.save(root, folder / "in.ckpt")
    convert(folder / "in.ckpt", folder / "out.pt", force=True, **options)
    return torch.load(folder / "out.pt")


def report(root: object, folder: Path, **options: object) -> Report:
    torch.save(root, folder / "in.ckpt")
    return convert(folder / "in.ckpt", folder / "out.pt", dry_run=True, **options)


def refusal(root: object, folder: Path, **options: object) -> str:
    (folder / "out.pt").unlink(missing_ok=True)
    with pytest.raises(CheckpointError) as caught:
        taken(root, folder, **options)
    assert not (folder / "out.pt").exists()
    return str(caught.value)


def keys_in(text: str) -> list[str]:
    """Return the values of --key in a message, as a shell understands them."""
    options = re.findall(r"--key ('[^']*'|[^' ]+)", text)
    return [word for option in options for word in shlex.split(option)]


def test_tensors_are_not_left_behind(tmp_path: Path) -> None:
    """Two levels of tensors are refused, and what is suggested can be typed."""
    others: list[tuple[object, str]] = [
        ({"a": torch.ones(2)}, "weights"),
        ({"deep": [({"a": torch.ones(1)},)]}, "weights.deep.0.0"),
        (nn.Linear(2, 2), "weights"),
    ]
    for other, key in others:
        for start in ("", "model."):
            root: object = {"step": torch.tensor(5), "weights": other}
            root = {"model": root} if start else root
            assert keys_in(refusal(root, tmp_path)) == [f"{start}{key}"]
            assert "weights in it others" in refusal(root, tmp_path, key=start.rstrip("."))
            assert report(root, tmp_path, key=f"{start}{key}").tensors


def test_an_average_without_buffers_is_not_the_weights(tmp_path: Path) -> None:
    for raw in ("model", "anything"):
        net, average = network(), dict(network().named_parameters())
        state = taken({raw: net.state_dict(), "ema": average}, tmp_path)
        assert all(same(state[name], value) for name, value in net.state_dict().items())
        holder = {"decay": torch.tensor(0.9), "shadow": network().state_dict()}
        state = taken({raw: net.state_dict(), "ema": holder}, tmp_path)
        assert all(same(state[name], value) for name, value in holder["shadow"].items())


def test_two_modules_are_not_told_apart(tmp_path: Path) -> None:
    root = {"first": network().state_dict(), "second": network()}
    assert keys_in(refusal(root, tmp_path)) == ["first", "second"]
    for key in ("first", "second"):
        network().load_state_dict(taken(root, tmp_path, key=key))
    assert keys_in(refusal([network().state_dict(), network()], tmp_path)) == ["0", "1"]


def averaged(name: str, average: nn.Module) -> dict[str, object]:
    """Return what a checkpoint has beside {"model": ...} for an average of the network."""
    state = average.state_dict()
    wrapped = {f"module.{name}": value for name, value in state.items()}
    return {
        "timm": {"state_dict_ema": state},
        "rtdetr": {"ema": {"module": state, "updates": 3}},
        "torchvision": {"model_ema": {**wrapped, "n_averaged": torch.tensor(3)}},
        "shadow": {"ema": {"decay": 0.99, "shadow": state}},
        "pickled": {"ema": average, "updates": 3},
    }[name]


def test_an_average_of_the_same_names_is_taken_and_said(tmp_path: Path) -> None:
    for name in ("timm", "rtdetr", "torchvision", "shadow", "pickled"):
        raw, average = network(), network()
        root = {"model": raw.state_dict(), **averaged(name, average), "epoch": 3}
        state = taken(root, tmp_path)
        assert all(same(state[key], value) for key, value in average.state_dict().items()), name
        (note,) = report(root, tmp_path).notes
        assert note.endswith(" is the average of model; --no-ema takes that")
        state = taken(root, tmp_path, ema=False)
        assert all(same(state[key], value) for key, value in raw.state_dict().items()), name
        assert report(root, tmp_path, ema=False).notes == []
        alone = taken({**averaged(name, average), "optimizer": {"state": {}}}, tmp_path)
        assert all(same(alone[key], value) for key, value in average.state_dict().items()), name


def test_an_average_that_does_not_fit_is_listed_as_dropped(tmp_path: Path) -> None:
    weights = network().state_dict()
    root = {"model": weights, "callbacks": {"EMA{a: 1}": {"ema_weights": weights}}}
    said = report(root, tmp_path)
    assert (said.key, said.dropped) == ("model", ["callbacks"])
    assert report(root, tmp_path, key="callbacks.EMA{a: 1}.ema_weights").tensors.keys() == {
        *weights
    }


MOMENTS = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}, "param_groups": []}


def test_a_few_tensors_are_not_taken_for_a_network(tmp_path: Path) -> None:
    assert "a bare tensor of shape (3, 4)" in refusal(torch.ones(3, 4), tmp_path)
    roots: list[tuple[object, list[str]]] = [
        ({"config": {"rate": 1}, "mean": torch.tensor(3.0), "std": torch.tensor(1.0)}, [""]),
        ({"config": {"mean": torch.ones(3)}, "arch": "resnet"}, ["config"]),
        (
            {"net": {"encoder": network().state_dict()}, "loss_scaler": {"scale": torch.ones(1)}},
            ["loss_scaler", "net.encoder"],
        ),
        (MOMENTS, []),
    ]
    for root, keys in roots:
        message = refusal(root, tmp_path)
        assert "no weights in a usual place; " in message
        assert "; it holds: " in message
        assert keys_in(message) == keys
        for key in keys:
            assert report(root, tmp_path, key=key).tensors
    assert "no weights at --key E" in refusal(MOMENTS, tmp_path, key="E")
    network().load_state_dict(
        taken({"weights": network().state_dict(), "opt": MOMENTS, "epoch": 3}, tmp_path)
    )


def test_a_state_dict_may_hold_what_is_plain(tmp_path: Path) -> None:
    state = OrderedDict(network().state_dict(), version=3, author="x", classes=["a"])
    state["head._extra_state"] = {"scale": 1}
    assert taken(state, tmp_path).keys() == network().state_dict().keys()
