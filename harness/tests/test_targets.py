"""A YAML file names what an experiment consists of; nothing else is imported or called."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from harness import UserError, load_run, targets
from harness.command import config_files
from harness.files import write_yaml
from harness.training.check_targets import check_targets
from tests.conftest import LIBRARY, ROOT
from tests.faults.fork_server import command
from tests.strategy_runs import write_conf


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the project, whatever a test reads."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(targets.VARIABLE, "")
    targets.load_rules("conf")


def install(folder: Path, name: str, code: str, requires: str = "") -> None:
    """Write a package as pip installs it."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    lines = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n"
    (about / "METADATA").write_text(lines + (f"Requires-Dist: {requires}\n" if requires else ""))
    (about / "top_level.txt").write_text(f"{name}\n")


REFUSED = [  # a name, and the origin in the message
    ("shutil.rmtree", ""),  # of the standard library, and of no required package
    ("yaml.load", ""),
    ("harness.strategies.dp.DataParallelStrategy.load_checkpoint", "Strategy"),  # unpickles
    ("small.models.CNN.load_state_dict", "torch.nn.modules.module.Module"),
    ("torch.utils.data.datapipes.iter.RoutedDecoder", "routeddecoder"),  # unpickles what it reads
    ("torch.hub.load", ""),
    # Functions elsewhere, by the names of modules that import them.
    ("torch.nn.functional.torch.load", "torch.serialization.load"),
    ("torch.nn.functional.handle_torch_function", "torch.overrides"),
    ("torch.nn.functional.torch.hub.load.__call__", ""),
    ("harness.testing.command", ""),
    ("hydra.utils.get_method", ""),
    # Classes that do harm when they are built.
    ("torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler", "Subproc"),
    ("numpy.memmap", "numpy.memmap"),
]


def test_what_no_experiment_consists_of_is_refused() -> None:
    """By its own name, and by where it is from; the line is what a user would write."""
    for target, real in REFUSED:
        with pytest.raises(UserError) as refused:
            targets.instantiate({"net": {"_target_": target, "_args_": ["/nowhere"]}})
        assert str(refused.value).startswith(f"net._target_: {target} is ")
        assert real in str(refused.value)
        assert "write in conf/rules.yaml: allowed: [small, " in str(refused.value)
    nested = {"model": {"_target_": "torch.nn.Linear"}, "x": {"y": {"_target_": "torch.load"}}}
    with pytest.raises(UserError, match=r"x\.y\._target_: torch\.load is torch\.serial"):
        check_targets(nested)  # before any of them is called


def test_what_an_experiment_consists_of_is_built() -> None:
    for target in (
        *("small.models.CNN", "torch.nn.HuberLoss", "datetime.timedelta"),
        *("torch.nn.functional.conv2d", "torch.nn.functional.logsigmoid", "torch.nn.init.zeros_"),
        *("torch.optim.SGD", "torch.utils.data.TensorDataset", "torchmetrics.MeanMetric"),
        *("lightning.pytorch.callbacks.Timer", "harness.features.schedules.cosine"),
        *("pytorch_lightning.demos.boring_classes.BoringModel", "optuna.samplers.TPESampler"),
    ):
        assert targets.instantiate({"_target_": target, "_partial_": True}), target


def test_every_yaml_file_that_ships_names_what_may_be_built() -> None:
    seen = 0
    for path in (*(ROOT / "conf").rglob("*.yaml"), *config_files.LIBRARY_CONF.rglob("*.yaml")):
        seen += len([*targets.import_targets(OmegaConf.to_container(OmegaConf.load(path)))])
    assert seen > 30


def test_packages_that_the_owner_requires_may_be_named_and_others_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lion = "import torch\nclass Lion(torch.optim.SGD): ...\ndef load(path): ...\n"
    install(tmp_path, "lion_like", lion)
    install(tmp_path, "tiger_like", lion)
    install(tmp_path, "owners_study", "", 'Lion.Like[fast]>=1; extra == "zoo"')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(targets.VARIABLE, "owners_study")
    targets.load_rules(tmp_path)
    weights = [torch.nn.Parameter(torch.ones(1))]
    built = targets.instantiate({"_target_": "lion_like.Lion", "lr": 0.5}, params=weights)
    assert built.defaults["lr"] == 0.5
    with pytest.raises(UserError, match=r"lion_like.load is not .* \[owners_study, lion_like.load"):
        targets.instantiate({"_target_": "lion_like.load", "path": "x"})
    with pytest.raises(UserError) as refused:
        targets.check({"a": {"_target_": "tiger_like.Lion"}, "b": [{"_target_": "os.system"}]})
    (line,) = str(refused.value).splitlines()
    assert line.startswith("a._target_: tiger_like.Lion and b[0]._target_: os.system are not allow")
    assert "If you trust them, write in" in line
    assert line.endswith("allowed: [owners_study, tiger_like, os.system]")
    assert "tiger_like" not in sys.modules


def test_a_strangers_experiment_is_refused_before_anything_is_imported(tmp_path: Path) -> None:
    """With a message of one line, a status that is not 0, and without a run's folder."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef run(): ...\n")
    theirs = "# @package _global_\ncallbacks: {mine: {_target_: evil.run}}\n"
    words = [*write_conf(tmp_path, experiment=theirs), f"output_dir={tmp_path}/out"]
    result = command("train.py", *words, environment={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    (said,) = result.stderr.strip().splitlines()
    assert said == (
        "callbacks.mine._target_: evil.run is not allowed. If you trust it, "
        "write in conf/rules.yaml: allowed: [small, evil]"
    )
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def test_a_strangers_run_is_refused(finished_run: Path, tmp_path: Path) -> None:
    """Whose folder has a config of its own."""
    shutil.copytree(finished_run / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    text = (finished_run / "config.yaml").read_text().partition("\n")[2]
    text = text.replace("small.models.MLP", "os.getcwd")
    write_yaml(tmp_path / "config.yaml", text)
    with pytest.raises(UserError, match=r"os\.getcwd is not allowed"):
        _ = load_run(tmp_path).model
    with pytest.raises(UserError, match="load_run\\(<folder>, conf="):
        _ = load_run(tmp_path, conf=tmp_path).model
    result = command("evaluate.py", f"checkpoint={tmp_path / 'checkpoints' / 'best.ckpt'}")
    assert result.returncode == 1
    assert "model.net._target_: os.getcwd are not allowed" in result.stderr  # with the picture


def test_the_line_allows_packages_and_whole_names(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("allowed: [json, pathlib.Path.cwd]\n")
    targets.load_rules(tmp_path)
    assert targets.instantiate({"_target_": "json.dumps", "obj": 3}) == "3"
    assert targets.instantiate({"_target_": "pathlib.Path.cwd"}) == Path.cwd()
    with pytest.raises(UserError, match=r"pathlib\.Path is not allowed"):
        targets.instantiate({"_target_": "pathlib.Path"})
    with pytest.raises(UserError, match=r"JSONDecoder.decode, and is not allowed"):
        targets.instantiate({"_target_": "json.JSONDecoder.decode"})


def read_rules(conf: Path) -> None:
    """Read the rules of a folder as a command does."""
    targets.load_rules(conf)
    config_files.rules(conf)


def test_mistakes_in_the_rules_are_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").touch()
    for text, said in {
        "allowed: timm": "must be a list of packages",
        "allowed: ['*']": "must be a list of packages",
        "just text": "has no keys",
        "allowed: [project": "is not valid YAML",
        "may_chnage: [seed]": "there is no rule may_chnage. Did you mean may_change?",
        "may_change: objective": "may_change: objective must be a list",
        "takes: [mode]": "takes: ['mode'] must be keys with a list each",
        "takes: {mode: min}": "takes: mode: min must be a list",
        "takes: {mine: []}": "takes: mine: [] must be a list",
    }.items():
        (tmp_path / "rules.yaml").write_text(text)
        with pytest.raises(UserError, match=r"rules\.yaml") as refused:
            read_rules(tmp_path)
        assert said in str(refused.value)
    (tmp_path / "rules.yaml").write_text("may_change: [mine]\ntakes: {data.mine: [3..]}")
    rules = config_files.rules(tmp_path)
    assert {"mine", "notes"} <= {*rules["may_change"]}
    assert (rules["takes"]["data.mine"], rules["takes"]["mode"]) == (["3.."], ["min", "max"])


def test_nothing_else_of_the_harness_builds_from_a_config() -> None:
    """Another call of Hydra's would know of no rules."""
    builds = re.compile(r"hydra\w*\.(utils\.)?instantiate\(|from hydra.* import .*instantiate")
    files = (LIBRARY / "src" / "harness").rglob("*.py")
    found = {path.name for path in files if builds.search(path.read_text())}
    assert found == {"targets.py", "hydra_versions.py"}
