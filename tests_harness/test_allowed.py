"""A YAML file names what is allowed, and with any Hydra nothing else is called or imported."""

import ast
import functools
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import UserError, allowed, frozen_files, load_run
from harness.testing import command
from tests_harness.conftest import ROOT

LINE = "write in conf/rules.yaml: allowed: [project, "


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the project, whatever a test reads."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(allowed.VARIABLE, "")
    allowed.follow("conf")


def stranger(folder: Path, text: str) -> list[str]:
    """Write an experiment that somebody else has sent; return the words that run it."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{text}")
    return [f"hydra.searchpath=[file://{folder}]", "experiment=theirs", f"output_dir={folder}/out"]


@pytest.mark.parametrize(
    ("target", "real", "line"),
    [
        ("shutil.rmtree", "shutil.rmtree", "shutil.rmtree"),
        ("torch.hub.load", "torch.hub.load", "torch.hub.load"),
        ("torch.nn.functional.torch.load", "torch.serialization.load", "torch.serialization.load"),
        ("project.models.cnn.nn.modules.module.torch.save", "torch.serialization.save", "torch."),
        ("harness.testing.command", "harness.testing.command", "harness.testing.command"),
        ("torch.nn.functional.torch.hub.load.__call__", "no class or function", "torch."),
        ("torch.nn.functional.torch.sys.modules.get", "no class or function", "torch."),
        ("kornia.losses.SSIMLoss", "kornia.losses.SSIMLoss", "kornia]"),
        ("project.models.cnn.CNN.load_state_dict", "torch.nn", ""),
        ("torch.nn.functional.conv2d", "torch.nn", ""),
    ],
)
def test_what_may_be_named(target: str, real: str, line: str) -> None:
    """By its own name and by that of where it is from; the line is what an owner would write."""
    if not line:
        assert allowed.instantiate({"_target_": target, "_partial_": True})
        return
    with pytest.raises(UserError) as refused:
        allowed.instantiate({"net": {"_target_": target, "_args_": ["/nowhere"]}})
    assert str(refused.value).startswith(f"net._target_: {target} is ")
    assert real in str(refused.value)
    assert f"{LINE}{line}" in str(refused.value)


def test_a_finder_is_given_a_path_and_no_more() -> None:
    for given in ({"_args_": ["joblib.load"]}, {}):
        with pytest.raises(UserError, match="get_method takes path"):
            allowed.instantiate({"net": {"_target_": "hydra.utils.get_method", **given}})


HANDLER = "handlers: {h: {(): torch.hub.load, repo_or_dir: ., model: m, source: local}}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"job_logging: {{{HANDLER}}}", "hydra.job_logging.handlers.h.(): torch.hub.load"),
        (f"mode: MULTIRUN\n  hydra_logging: {{{HANDLER}}}", "hydra.hydra_logging.handlers.h.()"),
        ("job_logging: {x: 'ext://evil.run'}", "hydra.job_logging.x: evil.run"),
        (
            "mode: MULTIRUN\n  sweeper: {params: {seed: {_target_: torch.hub.load}}}",
            "hydra.sweeper.params.seed._target_: torch.hub.load",
        ),
        (
            'callbacks: {a: {_target_: "${notes}"}}\nnotes: evil.run',
            "hydra.callbacks.a._target_: ${notes}",
        ),
    ],
)
def test_what_hydra_would_call_itself_is_refused(text: str, said: str, tmp_path: Path) -> None:
    result = command("train.py", *stranger(tmp_path, f"hydra:\n  {text}\n"))
    assert result.returncode == 1
    assert result.stderr.startswith(f"{said}"), result.stderr
    assert "is not allowed" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_strangers_experiment_is_refused_before_anything_is_imported(tmp_path: Path) -> None:
    """In a line, with a status that is not 0, and with no folder of a run."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef run(): ...\n")
    words = stranger(tmp_path, "callbacks:\n  mine:\n    _target_: evil.run\n")
    result = command("train.py", *words, environment={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    (said,) = result.stderr.strip().splitlines()
    assert said == (
        "callbacks.mine._target_: evil.run is not allowed. If you trust it, "
        "write in conf/rules.yaml: allowed: [project, evil]"
    )
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [(), ("-m", "seed=1,2")], ids=["run", "sweep"])
def test_callbacks_of_hydra_itself_are_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    text = "hydra:\n  callbacks:\n    mine:\n      _target_: pathlib.Path.touch\n"
    text += f"      _args_: ['{tmp_path}/ran']\n"
    result = command("train.py", *words, *stranger(tmp_path, text))
    assert result.returncode == 1
    assert "pathlib.Path.touch is not allowed" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "ran").exists()


def test_no_experiment_and_no_word_adds_to_the_rules(tmp_path: Path) -> None:
    text = "callbacks:\n  mine:\n    _target_: pathlib.Path\n"
    words = stranger(tmp_path, text)
    result = command("train.py", *words, "rules.allowed=[pathlib]")
    assert "pathlib.Path is not allowed" in result.stderr
    file = tmp_path / "experiment" / "theirs.yaml"
    file.write_text(f"{file.read_text()}rules:\n  allowed: [pathlib]\n")
    result = command("train.py", *words)
    assert "nothing reads rules" in result.stderr


def test_a_strangers_run_is_refused(finished_run: Path, tmp_path: Path) -> None:
    """Whose folder has a config of its own."""
    shutil.copytree(finished_run / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    text = (finished_run / "config.yaml").read_text().rpartition("# ")[0]
    text = text.replace("project.models.mlp.MLP", "os.getcwd")
    frozen_files.write_yaml(tmp_path / "config.yaml", text)
    with pytest.raises(UserError, match=r"os\.getcwd is not allowed"):
        _ = load_run(tmp_path).model
    with pytest.raises(UserError, match="load_run\\(<folder>, conf="):
        _ = load_run(tmp_path, conf=tmp_path).model
    result = command("evaluate.py", f"checkpoint={tmp_path / 'checkpoints' / 'best.ckpt'}")
    assert result.returncode == 1
    assert "os.getcwd is not allowed" in result.stderr


def test_the_line_allows_it(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("allowed: [kornia, pathlib.Path]\n")
    allowed.follow(tmp_path)
    assert allowed.instantiate({"_target_": "kornia.losses.SSIMLoss", "window_size": 3})
    assert allowed.instantiate({"_target_": "pathlib.Path"}) == Path()
    with pytest.raises(UserError, match=r"pathlib\.PurePath is not allowed"):
        allowed.instantiate({"_target_": "pathlib.PurePath"})


@pytest.mark.parametrize("text", ["allowed: kornia", "allowed: ['*']", "allowed: [3.5, {a: b}]"])
def test_rules_that_are_no_names_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(UserError, match=r"rules\.yaml: allowed: .* is no list of names"):
        allowed.follow(tmp_path)


def make_a_loss() -> Any:
    import kornia

    return kornia.losses.SSIMLoss(3)


def test_what_is_returned_belongs_to_an_allowed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra 1.4 looks at it; its sentence is ours. The environment allows this module."""
    monkeypatch.setenv(allowed.VARIABLE, "tests_harness")
    allowed.follow("conf")
    node = {"_target_": f"{__name__}.make_a_loss"}
    if not hasattr(sys.modules["hydra.utils"], "execution_whitelist"):
        assert allowed.instantiate(node)
        return
    with pytest.raises(UserError, match=r"make_a_loss returns kornia.* allowed: \[.*, kornia\]$"):
        allowed.instantiate(node)


def test_a_partial_goes_to_other_processes() -> None:
    """As ddp_spawn hands it over, by pickle; 1.4 would not let it."""
    made = allowed.instantiate({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5})
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, functools.partial)
    assert again([torch.nn.Parameter(torch.ones(1))]).defaults["lr"] == 0.5


def test_nothing_else_of_the_harness_builds_from_a_config() -> None:
    """Another call of Hydra's would know of no rules."""
    for path in (ROOT / "src" / "harness").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            used = isinstance(node, ast.ImportFrom) and node.module == "hydra.utils"
            assert not (used and "instantiate" in names), path
            is_call = isinstance(node, ast.Attribute) and node.attr == "instantiate"
            if is_call and path.name not in ("allowed.py", "hydra_versions.py"):
                assert ast.unparse(node) != "hydra.utils.instantiate", path
