"""What a run's folder promises: one command at a time, and no memory of where it was."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.command import run_folder
from harness.command.compose import compose
from harness.errors import UserError

HOLDER = """
import sys, time
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


def test_other_ranks_do_not_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with run_folder.locked(tmp_path):
        assert not (tmp_path / run_folder.LOCK).exists()


@pytest.mark.parametrize(
    "content", [None, b"", b"\0" * 4096, b"a: [1", b"- 1", b"text", b"\xff\xfe\x93"]
)
def test_damaged_config_is_refused_in_words(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(
        UserError, match=r"config.yaml is not the config of a run: .*\nBring it back"
    ):
        run_folder.load_config(tmp_path)
