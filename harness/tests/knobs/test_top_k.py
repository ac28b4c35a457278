"""The best checkpoints: as many as asked for, and best.ckpt is always the best of them."""

import json
from pathlib import Path

from harness.command.compose import compose
from tests.faults.resume_sweep import COMMON, train
from tests.knobs.recorder import Recorder


def test_best_links_to_the_best_of_k_files_at_any_time(tmp_path: Path) -> None:
    recorder = "+callbacks.recorder._target_=tests.knobs.recorder.Recorder"
    words = ("callbacks=top_k", "callbacks.checkpoint.save_top_k=2", "trainer.max_epochs=5")
    train(compose("train", [*COMMON, *words, recorder, f"run_dir={tmp_path}"]))
    assert len(Recorder.best) == 4
    assert all(link == best for link, best in Recorder.best)
    assert len(list((tmp_path / "checkpoints").glob("best-*.ckpt"))) == 2
    results = json.loads((tmp_path / "results.json").read_text())
    assert "test/accuracy" in results
