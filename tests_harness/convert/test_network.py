"""The run's config two folders above the checkpoint says which network the weights must fit."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.nn import RemoteModule

from harness.convert import CheckpointError, convert

from .checkpoint_matrix import lightning, prefixed, trained


class OnlyModule(nn.Module):
    """A network whose only child is called as a wrapper calls its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.module = nn.Linear(width, width)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise RuntimeError("needs its data set")


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the networks above into the project."""
    module = types.ModuleType("project.models_of_test")
    for cls in (OnlyModule, Broken):
        monkeypatch.setattr(cls, "__module__", module.__name__)
        setattr(module, cls.__name__, cls)
    module.touch, module.RemoteModule = Path.touch, RemoteModule
    monkeypatch.setitem(sys.modules, module.__name__, module)


def run_with(network: nn.Module, config: object, folder: Path, prefix: str = "net.") -> Path:
    path = folder / "run" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save(lightning(prefixed(prefix, network)), path)
    (folder / "run" / "config.yaml").write_text(json.dumps({"model": {"net": config}}))
    return path


SYSTEM = "harness.convert.read.os.system"
NOTHING = "project.nothing.Here"
TOUCH = "project.models_of_test.touch"
# A torch.nn.Module that opens connections, and that a module of this package might import.
REMOTE = "project.models_of_test.RemoteModule"
LINEAR = {"_target_": "torch.nn.Linear", "in_features": 3, "out_features": 2}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_result_is_loaded_strictly(suffix: str, tmp_path: Path) -> None:
    path = run_with(nn.Linear(3, 2), LINEAR, tmp_path)
    report = convert(path, tmp_path / f"out{suffix}")
    assert report.verified == ["every byte", "loads strict into config.yaml's Linear"]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "network", [nn.Linear(3, 4), nn.Linear(3, 2, bias=False), nn.Bilinear(1, 1, 1)]
)
def test_weights_that_do_not_fit_get_no_name(
    network: nn.Module, suffix: str, tmp_path: Path
) -> None:
    path = run_with(network, LINEAR, tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit the network of config.yaml: .*"):
        convert(path, tmp_path / f"out{suffix}")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_without_verification_nothing_is_built(tmp_path: Path) -> None:
    path = run_with(nn.Linear(3, 4), LINEAR, tmp_path)
    assert convert(path, tmp_path / "out.pt", verify=False).verified == []


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.module."])
def test_a_real_child_called_module_is_known_from_the_network(wrapper: str, tmp_path: Path) -> None:
    network = trained(OnlyModule(3))
    config = {"_target_": "project.models_of_test.OnlyModule", "width": 3}
    path = run_with(network, config, tmp_path, prefix=f"net.{wrapper}")
    convert(path, tmp_path / "out.pt")
    network.load_state_dict(torch.load(tmp_path / "out.pt"))


def test_nested_networks_are_built(tmp_path: Path) -> None:
    config = {"_target_": "torch.nn.Sequential", "_args_": [LINEAR, LINEAR | {"in_features": 2}]}
    path = run_with(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), config, tmp_path)
    assert "Sequential" in convert(path, tmp_path / "out.pt").verified[1]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"_target_": "os.system", "command": "touch {mark}"}, "os.system is not a network"),
        ({"_target_": TOUCH, "self": "{mark}"}, "touch"),
        ({"_target_": SYSTEM, "command": "touch {mark}"}, "os.system"),
        ({"_target_": "torch.hub.load", "repo_or_dir": "a/b"}, "torch.hub.load is not a network"),
        (LINEAR | {"device": {"_target_": "os.system", "_args_": ["touch {mark}"]}}, "os.system"),
        (LINEAR | {"bias": "${oc.create:{_target_:os.system}}"}, "interpolations"),
        ({"_target_": "torch.nn.Sequential", "_args_": [{"_target_": "builtins.eval"}]}, "eval"),
        ({"_target_": REMOTE, "remote_device": "host/cpu"}, "RemoteModule is not a network"),
        ({"_target_": "timm.create_model"}, "timm.create_model is not a network"),
        ({"_target_": "project.models_of_test.Broken"}, "needs its data set"),
        ({"_target_": NOTHING}, NOTHING.rpartition(".")[0]),
        (LINEAR | {"width": 3}, "Linear"),
        ([1, 2], "model.net"),
    ],
)
def test_a_config_that_names_no_network_is_reported_and_not_run(
    config: object, reason: str, tmp_path: Path
) -> None:
    """A foreign checkpoint may come with a foreign config: only networks of ours are built."""
    mark = tmp_path / "executed"
    path = run_with(nn.Linear(3, 2), config, tmp_path)
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace("{mark}", str(mark)))
    report = convert(path, tmp_path / "out.pt")
    assert not mark.exists()
    (note,) = report.notes
    assert "\n" not in note
    assert note.startswith("not held against the network of ")
    assert reason in note
    assert report.verified == ["every byte"]


def test_a_config_that_is_not_yaml_is_reported(tmp_path: Path) -> None:
    path = run_with(nn.Linear(3, 2), LINEAR, tmp_path)
    (tmp_path / "run" / "config.yaml").write_text("a: [1")
    assert len(convert(path, tmp_path / "out.pt").notes) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nmodel: {net: *b}", "aliases"),
        ("# " + "x" * 200_000, "too large"),
        ("model: {net: " + "[" * 5_000 + "]" * 5_000 + "}", "recursion"),
    ],
)
def test_a_config_that_would_take_for_ever_is_not_read(
    text: str, reason: str, tmp_path: Path
) -> None:
    path = run_with(nn.Linear(3, 2), LINEAR, tmp_path)
    (tmp_path / "run" / "config.yaml").write_text(text)
    (note,) = convert(path, tmp_path / "out.pt").notes
    assert reason in note
