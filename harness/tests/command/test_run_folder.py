"""One command at a time uses a run's folder, and the folder can be moved."""

import threading
from pathlib import Path
from typing import Any

import pytest

from harness.command import main as cli
from harness.command import run_folder
from harness.command.compose import compose, compose_command
from harness.errors import UserError
from tests.faults.fork_server import command


def test_two_commands_that_choose_at_once_make_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits until the first has made its run, and finds it."""
    monkeypatch.setattr(cli, "run_in_folder", lambda *_: None)
    words = ["resume=auto", f"output_dir={tmp_path}"]
    with run_folder.choosing(tmp_path / "default"):
        second = threading.Thread(target=cli.start_command, args=[compose_command("train", words)])
        second.start()
        second.join(0.5)
        assert second.is_alive()
        assert not [*(tmp_path / "default").iterdir()]
        first = run_folder.make(tmp_path / "default")
        run_folder.save_config(run_folder.freeze(compose("train"), first), first)
        run_folder.save_overrides([], first)
    second.join()
    assert [*(tmp_path / "default").iterdir()] == [first]


def test_damaged_or_edited_file_of_a_run_is_refused_in_words(tmp_path: Path) -> None:
    """A config would be a record of what was not done, a flipped bit another setting."""
    config, words = tmp_path / "config.yaml", tmp_path / "overrides.yaml"
    with pytest.raises(UserError, match=r"config.yaml is not the config of a run: .*\nRestore it"):
        run_folder.load_config(tmp_path)
    run_folder.save_config(run_folder.freeze(compose("train", []), tmp_path), tmp_path)
    typed = ["+logger.mine.path=${run_dir}/mine.csv", "notes='${name}'", "seed=1"]
    run_folder.save_overrides(typed, tmp_path)
    assert run_folder.load_overrides(tmp_path) == typed  # as they were typed
    for path, load, hint in (
        (config, run_folder.load_config, r"was damaged or edited(.|\n)*Restore it"),
        (words, run_folder.load_overrides, r"overrides.yaml was damaged or edited"),
    ):
        frozen = path.read_bytes()
        edited = frozen.replace(b"seed: 1", b"seed: 2").replace(b"seed=1", b"seed=2")
        unsealed = frozen.partition(b"\n")[2]
        for content in (b"", b"\0" * 4096, b"\xff\xfe\x93", frozen[:-9], edited, unsealed):
            path.write_bytes(content)
            with pytest.raises(UserError, match=hint):
                load(tmp_path)
        path.write_bytes(frozen)


def test_run_that_begins_is_nobody_elses_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command resumes a run that another command, started at once, has just created."""
    words = ["trainer.max_epochs=1", f"output_dir={tmp_path}", "resume=auto"]
    others = []

    def start_another(*_: Any) -> None:
        others.append(command("train.py", *words))

    monkeypatch.setattr(cli, "run_in_folder", start_another)
    run_dir = cli.start_command(compose_command("train", words, "conf"))
    assert others[0].returncode == 1
    assert f"The run in {run_dir} is running in" in others[0].stderr
    assert {path.name for path in run_dir.iterdir()} == {".lock", "config.yaml", "overrides.yaml"}


def test_evaluation_computes_as_the_run_did(tmp_path: Path) -> None:
    """A test that takes gradients, as of forces, needs no word on the command line."""
    words = ["+trainer.inference_mode=false", "trainer.precision=64-true"]
    run_folder.save_config(run_folder.freeze(compose("train", words), tmp_path), tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.ckpt").touch()
    for task in ("evaluate", "predict"):
        cfg = compose(task, [f"checkpoint={tmp_path}"])  # stands for its best checkpoint
        assert cfg.checkpoint == str(tmp_path / "checkpoints" / "best.ckpt")
        assert (cfg.trainer.inference_mode, cfg.trainer.precision) == (False, "64-true")
