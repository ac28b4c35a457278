"""Of what a file holds, the weights are taken whole or not at all, under the network's names."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.convert import CheckpointError, Report, convert
from harness.convert.names import rename

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
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_are_not_left_behind(tmp_path: Path) -> None:
    """Two levels of tensors are refused, with the key of the deeper one."""
    for other in ({"a": torch.ones(2)}, [({"a": torch.ones(1)},)], nn.Linear(2, 2)):
        root = {"model": {"step": torch.tensor(5), "weights": other}}
        said = refusal(root, tmp_path, key="model")
        assert "model holds tensors, and weights in it others; --key model.weights" in said
    assert report(root, tmp_path, key="model.weights").tensors.keys() == {"weight", "bias"}


MOMENTS = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}, "param_groups": []}
STATE = network().state_dict()


@pytest.mark.parametrize(
    ("root", "inside", "key"),
    [
        (torch.ones(3, 4), "", None),
        (MOMENTS, "state, param_groups", None),
        ({"weights": STATE, "epoch": 3}, "weights, epoch", "weights"),
        ({"first": STATE, "second": network()}, "first, second", "second"),
        ([STATE, network()], "0, 1", "1"),
        ({"config": {"rate": 1}, "mean": torch.tensor(3.0)}, "config, mean", ""),
        ({"net": {"encoder": STATE}, "scale": torch.ones(1)}, "net, scale", "net.encoder"),
        ({"ema": {"module": STATE, "updates": 3}}, "ema", "ema.module"),
    ],
)
def test_where_there_is_doubt_the_entries_are_listed(
    root: object, inside: str, key: str | None, tmp_path: Path
) -> None:
    message = refusal(root, tmp_path)
    assert (
        f"no weights in a usual place, which holds: {inside}; take one with --key NAME" in message
    )
    assert "no weights at --key E, which holds: " in refusal(root, tmp_path, key="E")
    if key is not None:
        assert report(root, tmp_path, key=key).tensors


@pytest.mark.parametrize("name", ["state_dict_ema", "model_ema", "ema", "swa_model"])
def test_an_average_of_the_same_names_is_taken_and_said(name: str, tmp_path: Path) -> None:
    raw, average = network(), network()
    entry: object = average.state_dict()
    if name == "model_ema":
        entry = torch.optim.swa_utils.AveragedModel(average).state_dict()
    root = {"model": raw.state_dict(), name: average if name == "ema" else entry, "epoch": 3}
    state = taken(root, tmp_path)
    assert all(same(state[key], value) for key, value in average.state_dict().items())
    assert report(root, tmp_path).notes == [f"{name} is the average of model; --no-ema takes that"]
    state = taken(root, tmp_path, ema=False)
    assert all(same(state[key], value) for key, value in raw.state_dict().items())
    assert report(root, tmp_path, ema=False).notes == []


def test_an_average_that_does_not_fit_is_listed_as_dropped(tmp_path: Path) -> None:
    """Without BatchNorm's buffers, or deeper in the file."""
    root = {"model": STATE, "ema": dict(network().named_parameters()), "callbacks": {"EMA": STATE}}
    said = report(root, tmp_path)
    assert (said.key, said.dropped) == ("model", ["ema", "callbacks"])
    assert report(root, tmp_path, key="callbacks.EMA").tensors.keys() == STATE.keys()


def test_what_is_not_a_tensor_is_dropped_aloud(tmp_path: Path) -> None:
    state = OrderedDict(STATE, version=3, classes=["a"])
    state["head._extra_state"] = {"scale": 1}
    said = report(state, tmp_path)
    assert said.tensors.keys() == STATE.keys()
    names = ("version", "classes", "head._extra_state")
    assert said.dropped == [f"{name} (not a tensor)" for name in names]
    state = {"net.a": torch.ones(2), "mean": torch.ones(1), "loss.w": torch.ones(1)}
    said = report({"state_dict": state, "epoch": 3, "pytorch-lightning_version": "2"}, tmp_path)
    assert (said.left_out, said.dropped) == (
        ["mean", "loss.*"],
        ["epoch", "pytorch-lightning_version"],
    )
    assert "the file alone lacks them" in str(said)
    assert "holds names that are not text" in refusal(
        {0: torch.ones(1), "a": torch.ones(1)}, tmp_path
    )


def renamed(
    *names: str, prefix: str = "auto", is_lightning: bool = False, ema: bool = True
) -> dict[str, str]:
    return rename(names, prefix, is_lightning, ema, keep_module=False)[0]


def test_what_only_looks_like_a_wrapper_stays() -> None:
    """Other words, parameters, a `module` that has siblings."""
    for names in (
        *(["submodule.weight"], ["a.submodule.b"], ["module_list.0"], ["a._orig_mod_.b"]),
        *(["modules.a"], ["a.module", "b._orig_mod"], ["net.module.weight", "net.fc.weight"]),
    ):
        assert renamed(*names) == {name: name for name in names}


def test_a_wrapper_that_only_its_name_tells_is_said_and_may_be_kept() -> None:
    names = ("net.module.0.weight", "net.module.0.bias")
    new, (note,) = rename(names, "auto", True, True, keep_module=False)
    assert set(new.values()) == {"0.weight", "0.bias"}
    assert "--prefix net takes it for the network's own child" in note
    assert set(renamed(*names, prefix="net").values()) == {"module.0.weight", "module.0.bias"}
    for certain in (["a.b", "module"], ["module.a", "n_averaged"], ["module.a", "b"]):
        assert rename(certain, "auto", False, True, keep_module=False)[1] == []


def test_two_names_that_would_become_one_are_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"a\.weight and a\._orig_mod\.weight would both"):
        renamed("a.weight", "a._orig_mod.weight")


def test_only_net_and_model_are_taken_for_the_network() -> None:
    """An only child of another name stays: the weights fit the module that was trained."""
    assert len(renamed("generator.a", "critic.a", is_lightning=True)) == 2
    assert renamed("encoder.a", is_lightning=True) == {"encoder.a": "encoder.a"}
    assert renamed("model.a", "loss.w", is_lightning=True) == {"model.a": "a"}
    assert renamed("model.a", "model.b") == {"model.a": "model.a", "model.b": "model.b"}


def test_a_prefix_names_the_network() -> None:
    names = ("gan._orig_mod.generator.a", "gan._orig_mod.critic.a")
    assert renamed(*names, prefix="gan.critic") == {"gan._orig_mod.critic.a": "a"}
    assert len(renamed(*names, prefix="", is_lightning=True)) == 2
    with pytest.raises(CheckpointError, match=r"nothing is called g\.\*; there is: gan"):
        renamed(*names, prefix="g")


def test_an_averaged_submodule_is_preferred_unless_declined() -> None:
    names = ("net.a", "ema_net.module.a", "ema_net.n_averaged")
    assert renamed(*names, is_lightning=True) == {"ema_net.module.a": "a"}
    assert renamed(*names, is_lightning=True, ema=False) == {"net.a": "a"}
    assert renamed("net.a", "net.b", "ema.a", is_lightning=True).keys() == {"net.a", "net.b"}
    _, (note,) = rename(["net.a", "swa_net.a"], "auto", True, True, keep_module=False)
    assert note == "swa_net is the average of net; --no-ema takes net"
