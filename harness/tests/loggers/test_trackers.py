"""Runs in W&B and MLflow are Lightning's own loggers; the trackers are lists where none is here."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytorch_lightning import loggers
from pytorch_lightning.loggers import Logger

from harness import train
from harness.command import run_folder
from harness.command.compose import compose_command
from harness.features import trackers
from harness.training.build import make
from tests.conftest import ROOT, train_command
from tests.faults.fork_server import command

INSTALLED = [name for name in ("wandb", "mlflow") if find_spec(name)]


class Client:
    """MLflow's, which keeps runs in a list that outlives a process."""

    runs: list[Any] = []  # noqa: RUF012

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name) if Client.runs else None

    def search_runs(self, experiments: list[str], tag: str) -> list[Any]:
        return [run for run in Client.runs if tag == f"tags.`harness_run` = '{run.tag}'"]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build a run's tracker, of which each argument is kept, from the frozen config."""
    given: dict[str, Any] = {}

    def init(self: Any, **arguments: Any) -> None:
        given.update(arguments)

    for kind in (loggers.WandbLogger, loggers.MLFlowLogger):
        monkeypatch.setattr(kind, "__init__", init)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setattr(Client, "runs", [])

    def build(name: str, run_dir: Path) -> tuple[Any, dict[str, Any]]:
        words = [f"logger={name}", "name=mine", f"output_dir={tmp_path}"]
        cfg = compose_command("train", words, ROOT / "conf").cfg
        frozen = run_folder.resolved(run_folder.freeze(cfg, run_dir))
        given.clear()
        return make(frozen.logger[name]), dict(given)

    return build


def test_wandb_is_lightnings_logger_in_the_run_s_folder(built, tmp_path: Path) -> None:
    logger, given = built("wandb", tmp_path / "mine" / "first")
    assert type(logger) is loggers.WandbLogger
    assert given["save_dir"] == str(tmp_path / "mine" / "first")
    assert given["id"] == given["name"] == "mine-first"
    assert given["project"] == "mine"
    assert given["offline"] is True
    assert given["log_model"] is False


def test_mlflow_goes_on_with_the_run_of_the_first_start(built, tmp_path: Path) -> None:
    run_dir = tmp_path / "mine" / "first"
    logger, given = built("mlflow", run_dir)
    assert type(logger) is loggers.MLFlowLogger
    assert given["run_id"] is None
    assert given["tracking_uri"] == f"sqlite:///{tmp_path}/mlflow.db"
    tag = given["tags"]["harness_run"]
    Client.runs += [SimpleNamespace(tag=tag, info=SimpleNamespace(run_id="7"))]
    assert built("mlflow", run_dir)[1]["run_id"] == "7"
    assert built("mlflow", tmp_path / "mine" / "other")[1]["run_id"] is None


class Failing(Logger):
    """A tracker whose server is gone."""

    name = version = "failing"
    calls: list[int] = []  # noqa: RUF012

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    def log_metrics(self, *_: Any, **__: Any) -> None:
        self.calls.append(1)
        raise ConnectionError("no route to host")


def test_tracker_that_fails_costs_no_result_and_is_waited_for_no_more(tmp_path: Path) -> None:
    short = ("data=synthetic", "model=mlp", "data.num_train=640", "trainer.max_epochs=1")
    words = (f"+logger.mine._target_={__name__}.Failing", "callbacks.progress_bar=null")
    run = train(*short, *words, f"output_dir={tmp_path}")
    assert "test/accuracy" in run.results
    assert len(Failing.calls) == 1
    told = (run.folder / "run.log").read_text()
    said = "Failing.log_metrics failed, and the run continues without it: no route to host"
    assert told.count(said) == 1
    assert "Traceback" in told


def test_tracker_gets_the_whole_config_and_is_beside_the_default_loggers(
    built, tmp_path: Path, monkeypatch
) -> None:
    logger, _ = built("mlflow", tmp_path / "mine" / "first")
    told: list[Any] = []
    monkeypatch.setattr(logger, "log_hyperparams", told.append)
    cfg = compose_command("train", ["logger=[mlflow,wandb]"], ROOT / "conf").cfg
    trackers.log_settings([logger, Failing()], cfg)
    assert [*told[0]["logger"]] == ["tensorboard", "csv", "mlflow", "wandb"]


@pytest.mark.skipif(bool(INSTALLED), reason="a tracker is installed")
def test_tracker_that_is_not_installed_is_told_in_a_line(tmp_path: Path) -> None:
    done = command("train.py", "model=mlp", "logger=wandb", f"output_dir={tmp_path}")
    assert done.returncode == 1
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="no tracker is installed")
def test_run_trains_with_the_trackers_that_are_here_and_goes_on(tmp_path: Path) -> None:
    words = ["data=synthetic", "model=mlp", f"logger=[{','.join(INSTALLED)}]", "resume=auto"]
    for epochs in (1, 2):
        train_command(tmp_path, *words, f"trainer.max_epochs={epochs}")
        screen = (tmp_path / "screen.txt").read_text()
        assert "failed, and the run continues" not in screen
    if "mlflow" in INSTALLED:
        from mlflow import MlflowClient

        client: Any = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        experiment = client.get_experiment_by_name("default")
        assert len(client.search_runs([experiment.experiment_id])) == 1
