import shutil
from pathlib import Path

from omegaconf import OmegaConf

from harness.command import run_folder
from harness.command.compose import compose


def test_evaluation_computes_as_the_run_did(finished_run: Path, tmp_path: Path) -> None:
    """A test that takes gradients, as of forces, needs no word on the command line."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished_run, run_dir, symlinks=True)
    saved = OmegaConf.load(run_dir / "config.yaml")
    OmegaConf.set_struct(saved, False)
    saved.trainer.inference_mode, saved.trainer.precision = False, "64-true"
    run_folder.save_config(saved, run_dir)
    words = [f"checkpoint={run_dir}"]  # stands for its best checkpoint
    for task in ("evaluate", "predict"):
        cfg = compose(task, words)
        trainer = cfg.trainer
        assert cfg.checkpoint == str(run_dir / "checkpoints" / "best.ckpt")
        assert (trainer.inference_mode, trainer.precision) == (False, "64-true")
    assert (
        "inference_mode"
        not in compose("evaluate", [words[0].replace(str(run_dir), str(finished_run))]).trainer
    )
