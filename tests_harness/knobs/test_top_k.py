"""The best checkpoints: as many as asked for, and best.ckpt is always the best of them."""

import json
from pathlib import Path

import pytest

from harness.command.compose import compose
from tests_harness.conftest import slow
from tests_harness.faults.fork_server import command
from tests_harness.faults.resume_sweep import COMMON, train
from tests_harness.knobs.recorder import Recorder


@pytest.mark.parametrize("watch", ["none", *slow("default")])
def test_best_links_to_the_best_of_k_files_at_any_time(watch: str, tmp_path: Path) -> None:
    cfg = compose(
        "train",
        [
            *COMMON,
            "callbacks=top_k",
            f"watch={watch}",
            "callbacks.checkpoint.save_top_k=2",
            "trainer.max_epochs=5",
            "+callbacks.recorder._target_=tests_harness.knobs.recorder.Recorder",
            f"run_dir={tmp_path}",
        ],
    )
    train(cfg)
    assert len(Recorder.best) == 4
    assert all(link == best for link, best in Recorder.best)
    assert len(list((tmp_path / "checkpoints").glob("best-*.ckpt"))) == 2
    results = json.loads((tmp_path / "results.json").read_text())
    assert "test/accuracy" in results


def test_best_of_them_is_what_is_tested_again(tmp_path: Path) -> None:
    words = ("data=synthetic", "model=mlp", "trainer.max_epochs=4", "callbacks=top_k")
    result = command("train.py", *words, f"output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    (run_dir,) = (tmp_path / "default").iterdir()
    results = json.loads((run_dir / "results.json").read_text())
    paths = sorted((run_dir / "checkpoints").glob("best*.ckpt"))
    assert len(paths) == 4
    scores = {}
    for i, path in enumerate(paths):
        result = command("evaluate.py", f"checkpoint={path}", f"output_dir={tmp_path / str(i)}")
        assert result.returncode == 0, result.stderr
        (file,) = (tmp_path / str(i)).glob("evaluate/*/results.json")
        scores[path.name] = json.loads(file.read_text())["test/loss"]
    assert scores["best.ckpt"] == results["test/loss"]
    assert len(set(scores.values())) == 3  # the link, and two more
