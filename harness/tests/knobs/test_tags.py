"""Tags and notes go with a run: on the screen, in its config, over a resume."""

from pathlib import Path

from harness import load_run
from tests.faults.fork_server import command

SHORT = ("data=synthetic", "model=mlp", "trainer.max_epochs=1")


def test_tags_and_notes_are_kept_shown_and_may_change_on_resume(tmp_path: Path) -> None:
    words = ("tags=[baseline,lr]", "notes=why")
    result = command("train.py", *SHORT, *words, f"output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert "baseline, lr" in result.stdout
    (run_dir,) = (tmp_path / "default").iterdir()
    kept = load_run(run_dir).config
    assert (list(kept.tags), kept.notes) == (["baseline", "lr"], "why")

    words = ("tags=[baseline]", "notes=longer", "trainer.max_epochs=2")
    result = command("train.py", f"resume={run_dir}", *words)
    assert result.returncode == 0, result.stderr
    kept = load_run(run_dir).config
    assert (list(kept.tags), kept.notes) == (["baseline"], "longer")
