"""What a run's folder promises: one command at a time, and no memory of where it was."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.command import main as cli
from harness.command import run_folder
from harness.command.compose import compose, compose_command
from harness.errors import UserError
from tests.faults.fork_server import command

HOLDER = """
import sys, time
import threading
from pathlib import Path
from harness.command import run_folder
with run_folder.locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_config_of_a_copy_names_the_copy(tmp_path: Path) -> None:
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.mkdir()
    run_folder.save_config(
        run_folder.freeze(compose("train", ["debug=profile"]), original), original
    )
    original.rename(copy)
    text = OmegaConf.to_yaml(run_folder.resolved(run_folder.load_config(copy)))
    assert str(original) not in text
    assert text.count(str(copy)) >= 4


def test_folder_of_a_living_run_is_refused(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        try:
            with pytest.raises(UserError, match=f"process {holder.pid} on ") as refused:
                run_folder.locked(tmp_path).__enter__()
            assert str(tmp_path) in str(refused.value)
        finally:
            holder.kill()
    with run_folder.locked(tmp_path):  # it has died, and the lock with it
        pass
    with run_folder.locked(tmp_path):
        pass


def test_two_commands_that_choose_at_once_make_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second waits until the first has made its run, and finds it."""
    monkeypatch.setattr(cli, "compute_in", lambda *_: None)
    words = ["resume=auto", f"output_dir={tmp_path}"]
    with run_folder.choosing(tmp_path / "default"):
        second = threading.Thread(target=cli.start, args=[compose_command("train", words)])
        second.start()
        second.join(0.5)
        assert second.is_alive()
        assert not [*(tmp_path / "default").iterdir()]
        first = run_folder.make(tmp_path / "default")
        for save, what in (
            (run_folder.save_config, run_folder.freeze(compose("train"), first)),
            (run_folder.save_words, []),
        ):
            save(what, first)
    second.join()
    assert [*(tmp_path / "default").iterdir()] == [first]


def test_damaged_or_edited_file_of_a_run_is_refused_in_words(tmp_path: Path) -> None:
    """A config would be a record of what was not done, a flipped bit another setting."""
    config, words = tmp_path / "config.yaml", tmp_path / "overrides.yaml"
    with pytest.raises(UserError, match=r"config.yaml is not the config of a run: .*\nBring it"):
        run_folder.load_config(tmp_path)
    run_folder.save_config(run_folder.freeze(compose("train", []), tmp_path), tmp_path)
    typed = ["+logger.mine.path=${run_dir}/mine.csv", "notes='${name}'", "seed=1"]
    run_folder.save_words(typed, tmp_path)
    assert run_folder.load_words(tmp_path) == typed  # as they were typed
    for path, load, hint in (
        (config, run_folder.load_config, r"was damaged, or edited(.|\n)*Bring it back"),
        (words, run_folder.load_words, r"overrides.yaml is not what was frozen"),
    ):
        frozen = path.read_bytes()
        edited = frozen.replace(b"seed: 1", b"seed: 2").replace(b"seed=1", b"seed=2")
        lines = edited.splitlines(keepends=True)
        middle = len(frozen) // 2
        flipped = frozen[:middle] + bytes([frozen[middle] ^ 4]) + frozen[middle + 1 :]
        cut = frozen[:middle]
        unsealed = (edited, b"".join(lines[1:]), b"".join(lines[:-1]), b"".join(lines[1:-1]))
        for content in (b"", b"\0" * 4096, b"\xff\xfe\x93", flipped, cut, *unsealed):
            path.write_bytes(content)
            with pytest.raises(UserError, match=hint):
                load(tmp_path)
        path.write_bytes(frozen)


def test_run_that_begins_is_nobody_elses_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that are started at once: none goes on with a run that another has just made."""
    words = ["trainer.max_epochs=1", f"output_dir={tmp_path}", "resume=auto"]
    others = []

    def start_another(*_: Any) -> None:
        others.append(command("train.py", *words))

    monkeypatch.setattr(cli, "compute_in", start_another)
    run_dir = cli.start(compose_command("train", words, "conf"))
    assert others[0].returncode == 1
    assert f"The run in {run_dir} is alive" in others[0].stderr
    assert sorted(path.name for path in run_dir.iterdir()) == [
        ".lock",
        "config.yaml",
        "overrides.yaml",
    ]
