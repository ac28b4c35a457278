"""Weights in a file are taken completely or not at all, under the network's names."""

from pathlib import Path

import pytest
import torch
from torch import nn

from harness.convert import CheckpointError, Weights, convert
from harness.convert.choose import ENTRIES, rename

from .checkpoint_matrix import same


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


STATE = network().state_dict()
MOMENTS = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(1.0)}}, "param_groups": []}


def report(root: object, folder: Path, **options: object) -> Weights:
    torch.save(root, folder / "in.ckpt")
    return convert(folder / "in.ckpt", folder / "out.pt", dry_run=True, **options)


def refusal(root: object, folder: Path, **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        report(root, folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("root", "inside", "key"),
    [
        (torch.ones(3, 4), "", None),
        (MOMENTS, "state, param_groups", None),
        ({"weights": STATE, "epoch": 3}, "weights, epoch", "weights"),
        ([STATE, network()], "0, 1", "1"),
        ({"config": {"rate": 1}, "mean": torch.tensor(3.0)}, "config, mean", ""),
        ({"model": {"encoder": STATE}, "scale": torch.ones(1)}, "model, scale", "model.encoder"),
        ({"ema": {"module": STATE, "updates": 3}}, "ema", "ema.module"),
        ({"net.ema": STATE, "net": {"step": 3}}, "net.ema, net", "net.ema"),
        ({"runs": {"v1.0": {"net": STATE}}}, "runs", "runs.v1.0.net"),
    ],
)
def test_where_there_is_doubt_the_entries_are_listed(
    root: object, inside: str, key: str | None, tmp_path: Path
) -> None:
    listed = f". The file has the entries {inside}. Choose one of them with --key NAME"
    assert f"no weights at the entries {', '.join(ENTRIES)}{listed}" in refusal(root, tmp_path)
    assert f"no weights at --key 'E'{listed}" in refusal(root, tmp_path, key="E")
    if key is not None:
        assert report(root, tmp_path, key=key).tensors


def test_tensors_are_not_left_behind(tmp_path: Path) -> None:
    """Two levels of tensors are refused, and a message lists other omitted entries."""
    for other in ({"a": torch.ones(2)}, [torch.ones(1)], nn.Linear(2, 2)):
        root = {"model": {"step": torch.tensor(5), "weights": other}}
        said = refusal(root, tmp_path, key="model")
        assert "model holds tensors, and its entry weights holds further tensors. Choose" in said
    assert report(root, tmp_path, key="model.weights").tensors.keys() == {"weight", "bias"}
    said = report({**STATE, "version": 3, "0._extra_state": {"scale": torch.ones(1)}}, tmp_path)
    assert said.tensors.keys() == STATE.keys()
    assert said.left_out == [f"{name} (not a tensor)" for name in ("version", "0._extra_state")]
    state = {"net.a": torch.ones(2), "mean": torch.ones(1), "loss.w": torch.ones(1)}
    said = report({"state_dict": state, "epoch": 3, "pytorch-lightning_version": "2"}, tmp_path)
    assert said.left_out == ["epoch", "pytorch-lightning_version", "mean", "loss.*"]
    mixed = {0: torch.ones(1), "a": torch.ones(1)}
    assert "the state_dict has keys that are not text" in refusal(mixed, tmp_path)


@pytest.mark.parametrize("name", ["state_dict_ema", "model_ema", "swa_model"])
def test_an_average_of_the_same_names_is_taken_and_said(name: str, tmp_path: Path) -> None:
    raw, average = network(), network()
    wrapped = torch.optim.swa_utils.AveragedModel(average) if name == "model_ema" else average
    root = {"model": raw.state_dict(), name: wrapped.state_dict(), "epoch": 3}
    for ema, note in (
        (True, [f"{name} is the average of model; --no-ema chooses model"]),
        (False, []),
    ):
        torch.save(root, tmp_path / "in.ckpt")
        assert convert(tmp_path / "in.ckpt", tmp_path / "out.pt", ema=ema, force=True).notes == note
        expected = (average if ema else raw).state_dict()
        state = torch.load(tmp_path / "out.pt")
        assert all(same(state[key], value) for key, value in expected.items())
    # Without BatchNorm's buffers, or deeper in the file, it is none.
    root = {"model": STATE, "ema": dict(network().named_parameters()), "callbacks": {"EMA": STATE}}
    said = report(root, tmp_path)
    assert (said.key, said.left_out) == ("model", ["ema", "callbacks"])
    assert report(root, tmp_path, key="callbacks.EMA").tensors.keys() == STATE.keys()


KEPT = (
    *(["submodule.weight"], ["a.submodule.b"], ["module_list.0"], ["a._orig_mod_.b"]),
    *(["modules.a"], ["a.module", "b._orig_mod"], ["net.module.weight", "net.fc.weight"]),
)
LIGHTNING = {"is_lightning": True}
NAMES = [
    *((names, {}, {name: name for name in names}) for names in KEPT),
    (["model.a", "model.b"], {}, {"model.a": "model.a", "model.b": "model.b"}),
    (["g.a", "c.a"], LIGHTNING, {"g.a": "g.a", "c.a": "c.a"}),
    (["encoder.a"], LIGHTNING, {"encoder.a": "encoder.a"}),
    (["model.a", "loss.w"], LIGHTNING, {"model.a": "a"}),
    (["net.module.0.w"], LIGHTNING, {"net.module.0.w": "0.w"}),
    (["net.module.0.w"], {"prefix": "net"}, {"net.module.0.w": "module.0.w"}),
    (["g._orig_mod.c.a", "g.d.a"], {"prefix": "g.c"}, {"g._orig_mod.c.a": "a"}),
    (["net.a", "b.c"], {"prefix": "", **LIGHTNING}, {"net.a": "net.a", "b.c": "b.c"}),
    (["net.a", "ema.module.a", "ema.n_averaged"], LIGHTNING, {"ema.module.a": "a"}),
    (["net.a", "ema.module.a", "ema.n_averaged"], {"ema": False, **LIGHTNING}, {"net.a": "a"}),
    (["net.a", "net.b", "ema.a"], LIGHTNING, {"net.a": "a", "net.b": "b"}),
]


@pytest.mark.parametrize(("names", "options", "expected"), NAMES)
def test_wrappers_and_the_networks_prefix_are_taken_away_and_nothing_else(
    names: list[str], options: dict[str, object], expected: dict[str, str]
) -> None:
    choice = {"prefix": "auto", "is_lightning": False, "ema": True} | options
    assert rename(names, **choice)[0] == expected


def test_what_was_decided_by_names_is_said() -> None:
    _, (note,) = rename(["net.module.0.weight"], "auto", True, True)
    assert "--prefix 'net' keeps it as a child of the network" in note
    _, (note,) = rename(["net.a", "swa_net.a"], "auto", True, True)
    assert note == "swa_net is the average of net; --no-ema chooses net"
    for certain in (["a.b", "module"], ["module.a", "n_averaged"], ["module.a", "b"]):
        assert rename(certain, "auto", False, True)[1] == []
    with pytest.raises(CheckpointError, match=r"a\.weight and a\._orig_mod\.weight would both"):
        rename(["a.weight", "a._orig_mod.weight"], "auto", False, True)
    with pytest.raises(CheckpointError, match=r"no tensor is named g\.\*. The names begin with"):
        rename(["net.a"], "g", True, True)
