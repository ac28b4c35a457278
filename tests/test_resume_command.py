"""``resume=`` as a user types it, with processes that are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from project import resume
from project.composition import compose
from tests.conftest import ROOT, command

SHORT = ("data=synthetic", "model=mlp", "trainer.max_epochs=3", "checkpoint.every_n_steps=5")
SLOW_STEPS = (
    "+callbacks.trace._target_=tests.faults.trace.Trace",
    "+callbacks.trace.seconds_per_batch=0.02",
)


def only(folder: Path) -> Path:
    (child,) = folder.iterdir()
    return child


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_steps(folder: Path, number: int) -> None:
    end = time.monotonic() + 90
    path = folder / "trace" / "steps_0"
    while not (path.exists() and path.stat().st_size >= number) and time.monotonic() < end:
        time.sleep(0.01)


def weights(output_dir: Path) -> dict[str, torch.Tensor]:
    path = only(output_dir / "default") / "checkpoints" / "last.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


def test_killed_command_goes_on_and_ends_equal_by_bit(tmp_path: Path) -> None:
    """kill -9 of the whole group, then the same words again."""
    trace = f"+callbacks.trace.folder={tmp_path}"
    words = (*SHORT, *SLOW_STEPS, "resume=auto", "model.net.dropout=0.2")
    killed, other = tmp_path / "killed", tmp_path / "other"
    process = start(*words, f"output_dir={killed}", f"{trace}/killed/trace")
    wait_for_steps(killed, 30)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    again = command("train.py", *words, f"output_dir={killed}", f"{trace}/killed/trace")
    assert again.returncode == 0, again.stderr
    whole = command("train.py", *words, f"output_dir={other}", f"{trace}/other/trace")
    assert whole.returncode == 0, whole.stderr
    for name, weight in weights(other).items():
        assert torch.equal(weight, weights(killed)[name]), name
    for file in ("metrics.csv", "results.json"):
        runs = [only(folder / "default") for folder in (killed, other)]
        assert (runs[0] / file).read_text() == (runs[1] / file).read_text()
    assert "Going on from" in (runs[0] / "run.log").read_text()


def test_interrupted_command_goes_on_with_other_devices(tmp_path: Path) -> None:
    """SIGTERM to two processes of ddp; one process ends the run."""
    words = (
        *SHORT,
        *SLOW_STEPS,
        f"output_dir={tmp_path}",
        f"+callbacks.trace.folder={tmp_path}/trace",
    )
    process = start(*words, "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    wait_for_steps(tmp_path, 25)
    process.send_signal(signal.SIGTERM)
    screen, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, screen
    assert "SIGTERM: saved step" in screen
    run_dir = only(tmp_path / "default")
    alone = command("train.py", f"resume={run_dir}", "strategy=cpu")
    assert alone.returncode == 0, alone.stderr
    reference = command("train.py", *SHORT, "strategy=cpu", f"output_dir={tmp_path / 'other'}")
    assert reference.returncode == 0, reference.stderr
    for name, weight in weights(tmp_path / "other").items():
        found = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        assert (weight - found[name]).abs().max() <= 1e-6, name


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    """A finished run that a test may change."""
    folder = tmp_path / "outputs" / "default" / finished_run.name
    shutil.copytree(finished_run, folder, symlinks=True)
    return folder


def test_finished_run_says_so(run_copy: Path) -> None:
    result = command(
        "train.py", "data=synthetic", "model=mlp", "trainer.max_epochs=2", "resume=auto",
        f"output_dir={run_copy.parents[1]}",
    )  # fmt: skip
    assert result.returncode == 0
    assert "has finished: test/loss" in result.stdout
    assert len(list(run_copy.parent.iterdir())) == 1


def test_finished_run_takes_more_epochs(run_copy: Path) -> None:
    result = command("train.py", f"resume={run_copy}", "trainer.max_epochs=3")
    assert result.returncode == 0, result.stderr
    last = torch.load(run_copy / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["epoch"] == 3
    assert "max_epochs: 3" in (run_copy / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        ("seed=2", "seed=2 (it has 1)"),
        ("data.batch_size=32", "data.batch_size=32 (it has 64)"),
        ("trainer.max_epochs=1", "trainer.max_epochs=1 (it has 2)"),
        ("model=cnn", "model.net._target_=project.models.cnn.CNN"),
        ("experiment=synthetic", "model.optimizer.lr=0.003 (it has 0.005)"),
    ],
)
def test_another_result_is_refused_with_the_difference(
    overrides: str, hint: str, run_copy: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()}
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    result = command(
        "train.py",
        f"resume={run_copy}",
        *overrides.split(),
        environment={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert result.returncode == 1
    assert hint in result.stderr
    assert "Leave that out" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 2
    assert {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()} == before


def test_where_a_run_is_computed_may_change(run_copy: Path) -> None:
    from project import resume
    from project.composition import compose

    words = ["strategy=ddp", "trainer.devices=2", "data.num_workers=1", "resume=auto"]
    config = resume.config(compose("train", words), words, run_copy)
    assert config.trainer.devices == 2
    assert config.trainer.strategy._target_.endswith("DDPStrategy")
    assert config.data.num_workers == 1
    assert config.model.net._target_.endswith("MLP")
    assert config.resume.endswith("step_40.ckpt")


def test_run_without_a_whole_checkpoint_is_refused(run_copy: Path) -> None:
    (run_copy / "results.json").unlink()
    for path in (run_copy / "checkpoints").glob("step_*"):
        path.write_bytes(path.read_bytes()[:-5])
    result = command("train.py", f"resume={run_copy}")
    assert result.returncode == 1
    assert "is damaged and was skipped" in result.stderr
    assert "No checkpoint in" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("resume=nowhere",), "Use resume=auto, or the folder of a run"),
        (("-m", "resume=auto", "seed=1,2"), "-m starts many"),
    ],
)
def test_mistaken_resume_is_explained(words: tuple[str, ...], hint: str, tmp_path: Path) -> None:
    result = command("train.py", *words, f"output_dir={tmp_path / 'outputs'}")
    assert result.returncode == 1
    assert hint in result.stderr
    assert "Traceback" not in result.stderr


def test_faults_lose_nothing(tmp_path: Path) -> None:
    """A few of every kind, by the program that docs/reliability.md was made with."""
    figures = tmp_path / "figures.json"
    result = command(
        *("-W", "ignore", "-m", "tests.faults", "kill", "storm", "write", "damage"),
        *("signal", "dead", "--num", "5", "--json", figures),
        timeout=170,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(json.loads(figures.read_text())) == 10


@pytest.mark.parametrize(("before", "after"), [("ddp", "dp"), ("dp", "ddp"), ("ddp_spawn", "ddp")])
def test_another_strategy_keeps_nothing_of_the_one_before(
    before: str, after: str, tmp_path: Path
) -> None:
    """Its class would refuse the other's settings, or follow them."""
    OmegaConf.save(compose("train", [f"strategy={before}"]), tmp_path / "config.yaml", resolve=True)
    asked = compose("train", [f"strategy={after}"])
    assert resume.config(asked, [f"strategy={after}"], tmp_path).trainer == asked.trainer
