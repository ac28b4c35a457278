"""Runs of before the harness had a package of its own still evaluate, go on and convert."""

import shutil
from pathlib import Path

import pytest
import torch

from harness import convert, evaluate, load_run, predict, train
from harness.command.aliases import today
from tests_harness.conftest import ROOT

MADE = ROOT / "tests_harness" / "runs" / "before_two_rooms"


@pytest.fixture
def older_run(tmp_path: Path) -> Path:
    """A copy of a run whose config names the old places, as it was made by the version before."""
    config = (MADE / "config.yaml").read_text()
    assert "project.callbacks.throughput.Throughput" in config
    folder = tmp_path / "before" / "run"
    shutil.copytree(MADE, folder)
    return folder


def test_older_run_evaluates_to_what_it_reached(older_run: Path) -> None:
    run = evaluate(older_run / "checkpoints" / "best.ckpt")
    before = load_run(older_run).results
    for name in ("test/accuracy", "test/f1", "test/loss"):
        assert run.results[name] == pytest.approx(before[name], abs=1e-5)
    table = predict(older_run / "checkpoints" / "best.ckpt")
    assert len(table.read_text().splitlines()) == 61


def test_older_run_goes_on_to_where_it_went(older_run: Path) -> None:
    expected = torch.load(older_run / "checkpoints" / "step_30.ckpt", weights_only=True)
    (older_run / "checkpoints" / "step_30.ckpt").unlink()
    (older_run / "results.json").unlink()
    run = train(f"resume={older_run}", f"output_dir={older_run.parents[1]}")
    assert run.folder == older_run.resolve()
    reached = torch.load(older_run / "checkpoints" / "step_30.ckpt", weights_only=True)
    for name, weight in expected["state_dict"].items():
        torch.testing.assert_close(reached["state_dict"][name], weight, atol=1e-5, rtol=0)


def test_older_run_converts(older_run: Path) -> None:
    target = older_run / "weights.pt"
    convert.convert(older_run / "checkpoints" / "best.ckpt", target)
    load_run(older_run).model.net.load_state_dict(torch.load(target))


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("my_study.callbacks.throughput.Throughput", "harness.watch.throughput.Throughput"),
        (
            "project.strategies.dp.DataParallelStrategy",
            "harness.strategies.dp.DataParallelStrategy",
        ),
        ("project.models.mlp.MLP", "project.models.mlp.MLP"),
        ("torch.optim.AdamW", "torch.optim.AdamW"),
        ("harness.loggers.tensorboard.TensorBoard", "harness.loggers.tensorboard.TensorBoard"),
    ],
)
def test_only_what_has_moved_gets_another_name(target: str, found: str) -> None:
    assert today(target) == found


def test_an_owners_module_of_the_same_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_of_test" / "callbacks").mkdir(parents=True)
    (tmp_path / "mine_of_test" / "callbacks" / "throughput.py").write_text("Throughput = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert today("mine_of_test.callbacks.throughput.Throughput").startswith("mine_of_test.")
