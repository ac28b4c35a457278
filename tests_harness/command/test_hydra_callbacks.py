"""``hydra.callbacks`` are called around a run as in Hydra, and a pickled job runs again."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from harness.command import from_python, hydra_job, run_folder
from harness.command import start as cli
from harness.command.compose import compose_command
from harness.errors import UserError
from tests_harness.faults.fork_server import command

HERE = f"+hydra.callbacks.noted._target_={__name__}"
RUN = ["on_run_start", "on_job_start", "on_job_end", "on_run_end"]


class Noted:
    """A user's callback that notes what it is told."""

    seen: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def __getattr__(self, hook: str) -> Callable[..., None]:
        if not hook.startswith("on_"):
            raise AttributeError(hook)
        return lambda **given: self.seen.append((hook, given))


class Changing(Noted):
    def on_run_start(self, config: DictConfig, **given: Any) -> None:
        config.seed = 77


class Failing(Noted):
    def on_job_start(self, **given: Any) -> None:
        raise ValueError("no luck")


@pytest.fixture(autouse=True)
def hydra_forgets() -> Iterator[None]:
    Noted.seen.clear()
    yield
    GlobalHydra.instance().clear()


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[DictConfig]:
    """Let runs write a result instead of training."""
    configs: list[DictConfig] = []

    def execute(task: str, frozen: DictConfig) -> None:
        configs.append(frozen)
        Path(frozen.run_dir, "results.json").write_text(json.dumps({"val/loss": 0.5}))

    monkeypatch.setattr(cli, "execute", execute)
    return configs


def plain_run(folder: Path, *words: str) -> None:
    cli.main("train", "conf", [f"output_dir={folder}", "objective=val/loss", "mode=min", *words])


def hooks() -> list[str]:
    return [hook for hook, _ in Noted.seen]


def test_a_plain_run_calls_the_hooks_as_hydra_does(
    executed: list[DictConfig], tmp_path: Path
) -> None:
    plain_run(tmp_path, f"{HERE}.Noted")
    assert hooks() == RUN
    given = dict(Noted.seen)
    run_dir = executed[0].run_dir
    assert given["on_job_start"]["config"].hydra.runtime.output_dir == run_dir
    assert given["on_run_start"]["config_name"] == "train"
    job = given["on_job_end"]["job_return"]
    assert job is given["on_run_end"]["job_return"]
    assert (job.status.name, job.return_value) == ("COMPLETED", 0.5)
    assert job.cfg.seed == executed[0].seed
    assert f"output_dir={tmp_path}" in job.overrides
    assert pickle.loads(pickle.dumps(given["on_job_start"]["task_function"])).task == "train"


def test_what_a_callback_changes_at_the_start_holds(
    executed: list[DictConfig], tmp_path: Path
) -> None:
    plain_run(tmp_path, f"{HERE}.Changing")
    assert executed[0].seed == 77
    assert run_folder.load_config(Path(executed[0].run_dir)).seed == 77


def test_a_run_that_fails_is_told_to_the_callbacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def execute(task: str, frozen: DictConfig) -> None:
        raise UserError("The data are gone.")

    monkeypatch.setattr(cli, "execute", execute)
    with pytest.raises(SystemExit, match="The data are gone"):
        plain_run(tmp_path, f"{HERE}.Noted")
    assert hooks() == RUN
    job = dict(Noted.seen)["on_run_end"]["job_return"]
    with pytest.raises(UserError, match="The data are gone"):
        _ = job.return_value


def test_a_run_that_is_refused_starts_no_job(executed: list[DictConfig], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"use min or max"):
        plain_run(tmp_path, f"{HERE}.Noted", "mode=most")
    assert hooks() == ["on_run_start", "on_run_end"]
    assert dict(Noted.seen)["on_run_end"]["job_return"].status.name == "FAILED"
    assert not executed


def test_a_callback_that_fails_stops_nothing(executed: list[DictConfig], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"Failing\.on_job_start raised ValueError: no luck"):
        plain_run(tmp_path, f"{HERE}.Failing")
    assert hooks() == ["on_run_start", "on_job_end", "on_run_end"]
    assert len(executed) == 1


def test_a_callback_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"Nobody(.|\n)*hydra\.callbacks\.noted"):
        plain_run(tmp_path, f"{HERE}.Nobody")
    assert not list(tmp_path.iterdir())


def test_of_several_processes_the_first_one_calls_the_hooks_of_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The start may change the config, which must be the same in every process."""
    monkeypatch.setenv("RANK", "1")
    composed = compose_command("train", [f"{HERE}.Noted"])
    with (
        hydra_job.run_callbacks(composed) as changed,
        hydra_job.job_callbacks(changed, tmp_path, cli.start),
    ):
        pass
    assert hooks() == ["on_run_start"]


def test_a_run_from_python_calls_them_too(executed: list[DictConfig], tmp_path: Path) -> None:
    run = from_python.train(f"output_dir={tmp_path}", "seed=5", f"{HERE}.Noted")
    assert hooks() == RUN
    assert str(run.folder) == executed[0].run_dir


PICKLED = "+hydra.callbacks.pickle._target_=hydra.experimental.callbacks.PickleJobInfoCallback"
TINY = ["seed=3", "data=synthetic", "model=mlp", "trainer.max_epochs=1", "watch=none"]


@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_a_pickled_job_runs_again_in_a_folder_of_its_own(flags: list[str], tmp_path: Path) -> None:
    first = command("train.py", *flags, *TINY, PICKLED, f"output_dir={tmp_path}")
    assert first.returncode == 0, first.stderr
    assert "raised" not in first.stderr
    (pickled,) = tmp_path.glob("**/.hydra/config.pickle")
    run_dir = pickled.parents[1]
    with (pickled.with_name("job_return.pickle")).open("rb") as file:
        job = pickle.load(file)
    results = run_folder.results(run_dir)
    assert job.return_value == results[run_folder.load_config(run_dir).objective]

    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    again = command("train.py", "--experimental-rerun", pickled)
    assert again.returncode == 0, again.stderr
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    (other,) = set((tmp_path / "default").iterdir()) - {run_dir}
    assert run_folder.results(other) == results
