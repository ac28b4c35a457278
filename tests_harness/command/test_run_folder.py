"""What a run's folder promises: one command at a time, and no memory of where it was."""

import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.command import run_folder, start
from harness.command.compose import compose, compose_command
from harness.errors import UserError
from harness.frozen_files import write_json
from tests_harness.faults.fork_server import command

DAMAGE = (
    lambda data, at: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
    lambda data, at: data[:at] + bytes(8) + data[at + 8 :],
    lambda data, at: data[:at] + data[at + 9 :],
    lambda data, at: data[:at] + b"x: 1\n" + data[at:],
    lambda data, at: data[:at],
    lambda data, at: data + b"seed: 2\n",
)
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


def test_words_stay_as_they_were_typed(tmp_path: Path) -> None:
    words = ["+logger.mine.path=${run_dir}/mine.csv", "notes='${name}'"]
    run_folder.save_words(words, tmp_path)
    assert run_folder.load_words(tmp_path) == words


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


def test_other_ranks_do_not_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with run_folder.locked(tmp_path):
        assert not (tmp_path / run_folder.LOCK).exists()


def test_damaged_config_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.yaml is not the config of a run: .*\nBring it"):
        run_folder.load_config(tmp_path)
    for content in (b"", b"\0" * 4096, b"a: [1", b"- 1", b"text", b"\xff\xfe\x93"):
        (tmp_path / "config.yaml").write_bytes(content)
        with pytest.raises(UserError, match=r"was damaged, or edited.\nBring it back"):
            run_folder.load_config(tmp_path)


def test_damage_to_a_config_is_never_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    run_folder.save_config(run_folder.freeze(compose("train", []), tmp_path), tmp_path)
    frozen = path.read_bytes()
    for damaged, place in itertools.product(DAMAGE, range(7, len(frozen), len(frozen) // 4)):
        path.write_bytes(damaged(frozen, place))
        with pytest.raises(UserError, match="Bring it back from a copy"):
            run_folder.load_config(tmp_path)


def test_edited_config_is_refused_also_without_its_first_and_last_line(tmp_path: Path) -> None:
    """It would be a record of what was not done."""
    path = tmp_path / "config.yaml"
    run_folder.save_config(run_folder.freeze(compose("train", []), tmp_path), tmp_path)
    edited = path.read_text().replace("seed: 1\n", "seed: 2\n")
    lines = edited.splitlines(keepends=True)
    for text in (edited, "".join(lines[1:]), "".join(lines[:-1]), "".join(lines[1:-1])):
        path.write_text(text)
        with pytest.raises(
            UserError, match=r"was damaged, or edited(.|\n)*Another setting belongs"
        ):
            run_folder.load_config(tmp_path)


def test_edited_words_of_a_run_are_refused(tmp_path: Path) -> None:
    run_folder.save_words(["experiment=table", "seed=3"], tmp_path)
    assert run_folder.load_words(tmp_path) == ["experiment=table", "seed=3"]
    path = tmp_path / "overrides.yaml"
    edited = path.read_text().replace("seed=3", "seed=4")
    path.write_text("".join(edited.splitlines(keepends=True)[1:-1]))
    with pytest.raises(UserError, match=r"overrides.yaml is not what was frozen"):
        run_folder.load_words(tmp_path)
    for text in (edited, "", "\0" * len(edited)):
        path.write_text(text)
        with pytest.raises(UserError, match=r"overrides.yaml is not what was frozen"):
            run_folder.load_words(tmp_path)


def test_commands_choose_a_run_one_after_another(tmp_path: Path) -> None:
    """Else each of several with resume=auto would find none, and begin one."""
    chosen: list[int] = []

    def choose() -> None:
        with run_folder.choosing(tmp_path / "outputs"):
            chosen.append(len(chosen))

    with run_folder.choosing(tmp_path / "outputs"):
        other = threading.Thread(target=choose)
        other.start()
        other.join(0.3)
        assert chosen == []
    other.join(60)
    assert chosen == [0]


def test_damaged_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"test/loss": 0.5}')  # of an older version
    assert run_folder.results(tmp_path) == {"test/loss": 0.5}
    write_json(path, '{"test/loss": 0.25}')
    assert run_folder.results(tmp_path) == {"test/loss": 0.25}
    path.write_text('{"test/loss": 0.35}')
    with pytest.raises(UserError, match=r"metrics.csv has the run's numbers"):
        run_folder.results(tmp_path)


def test_folder_whose_name_a_config_would_fill_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has \$\{ in its name"):
        run_folder.make(tmp_path / "of ${USER}")
    assert not list(tmp_path.iterdir())


def test_run_that_begins_is_nobody_elses_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that are started at once: none goes on with a run that another has just made."""
    words = ["trainer.max_epochs=1", f"output_dir={tmp_path}", "resume=auto"]
    others = []

    def start_another(*_: Any) -> None:
        others.append(command("train.py", *words))

    monkeypatch.setattr(start, "execute_in", start_another)
    run_dir = start.start(compose_command("train", words, "conf"))
    assert others[0].returncode == 1
    assert f"The run in {run_dir} is alive" in others[0].stderr
    assert sorted(path.name for path in run_dir.iterdir()) == [
        ".lock",
        ".starts",
        "config.yaml",
        "overrides.yaml",
    ]
