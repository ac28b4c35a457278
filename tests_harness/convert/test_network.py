"""The run's config two folders above the checkpoint says which network the weights must fit."""

import json
import os
import shutil
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.nn import RemoteModule

import harness.convert
from harness.convert import CheckpointError
from tests_harness.conftest import ROOT

from .checkpoint_matrix import lightning, prefixed, trained

convert = partial(harness.convert.convert, packages=["project"])


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
    for cls in (OnlyModule, Broken, Partly):
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


@pytest.mark.parametrize("packages", [[], ["own"], ["stranger"]])
def test_only_what_is_called_ones_own_is_imported(
    packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is downloaded may hold a package beside a config that names it."""
    (tmp_path / "stranger.py").write_text(
        "from pathlib import Path\nfrom torch import nn\n"
        f"Path({str(tmp_path / 'executed')!r}).touch()\n"
        "class Net(nn.Linear):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = run_with(nn.Linear(3, 2), LINEAR | {"_target_": "stranger.Net"}, tmp_path)
    report = harness.convert.convert(path, tmp_path / "out.pt", packages=packages)
    is_own = packages == ["stranger"]
    assert (tmp_path / "executed").exists() == is_own
    assert report.verified[1:] == ["loads strict into config.yaml's Net"] * is_own
    if not is_own:
        assert "stranger.Net is not a network of torch.nn" in report.notes[0]
        assert report.notes[0].endswith("; --package adds your own")


@pytest.mark.parametrize(
    "target", ["torchvision.Net", "torch.nnx.Net", "torch.nn", "projectile.Net"]
)
def test_a_package_is_not_another_that_begins_like_it(target: str, tmp_path: Path) -> None:
    path = run_with(nn.Linear(3, 2), {"_target_": target}, tmp_path)
    (note,) = convert(path, tmp_path / "out.pt").notes
    assert f"{target} is not a network of torch.nn or project" in note


@pytest.mark.parametrize("name", ["net", "model", "network"])
def test_a_network_is_known_by_its_usual_names(name: str, tmp_path: Path) -> None:
    path = run_with(nn.Linear(3, 2), LINEAR, tmp_path, prefix=f"{name}.")
    (tmp_path / "run" / "config.yaml").write_text(json.dumps({"model": {name: LINEAR}}))
    assert len(convert(path, tmp_path / "out.pt").verified) == 2


def test_a_model_that_is_itself_the_network_is_said_not_to_be_built(tmp_path: Path) -> None:
    path = run_with(nn.Linear(3, 2), LINEAR, tmp_path)
    (tmp_path / "run" / "config.yaml").write_text("model: {num_features: 3}")
    (note,) = convert(path, tmp_path / "out.pt").notes
    assert note.endswith("config.yaml: only a model's net, model, network is built")


class Partly(nn.Module):
    def __init__(self, layer: type[nn.Module], widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(width) for width in widths)


def test_partials_are_built_as_hydra_builds_them(tmp_path: Path) -> None:
    layer = {"_target_": "torch.nn.BatchNorm1d", "_partial_": True, "affine": False}
    config = {"_target_": "project.models_of_test.Partly", "layer": layer, "widths": [2, 3]}
    path = run_with(Partly(partial(nn.BatchNorm1d, affine=False), [2, 3]), config, tmp_path)
    assert "Partly" in convert(path, tmp_path / "out.pt").verified[1]


def test_what_the_rules_allow_is_held_against(tmp_path: Path) -> None:
    """A class of another package that conf/rules.yaml has been given."""
    for folder in ("conf", "scripts", "crystals"):
        (tmp_path / folder).mkdir()
    (tmp_path / "conf" / "rules.yaml").write_text("allowed: [project, crystals]\n")
    (tmp_path / "crystals" / "__init__.py").write_text(
        "from torch import nn\nclass Net(nn.Linear): ..."
    )
    shutil.copy(ROOT / "scripts" / "convert_checkpoint.py", tmp_path / "scripts")
    path = run_with(nn.Linear(3, 2), LINEAR | {"_target_": "crystals.Net"}, tmp_path)
    command = [sys.executable, "scripts/convert_checkpoint.py", str(path), "-o", "out.pt"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert "loads strict into config.yaml's Net" in result.stdout
