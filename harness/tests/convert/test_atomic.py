"""The output appears whole or not at all, and the input is never touched."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from harness.convert import CheckpointError, conversion, convert, write
from harness.errors import UserError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.save(
        {"state_dict": {str(i): torch.rand(1000, 1000) for i in range(8)}}, tmp_path / "a.ckpt"
    )
    return tmp_path / "a.ckpt"


def test_kill_at_any_moment_leaves_no_partial_file(checkpoint: Path, tmp_path: Path) -> None:
    content, output = checkpoint.read_bytes(), tmp_path / "out.pt"
    command = [sys.executable, "-m", "harness.convert", str(checkpoint), "-o", str(output)]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall_seconds = time.perf_counter() - start
    expected, num_killed = output.read_bytes(), 0
    for i in range(10):
        output.unlink(missing_ok=True)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            time.sleep(wall_seconds * (i + 1) / 12)
            process.kill()
        num_killed += process.returncode == -signal.SIGKILL
        assert not output.exists() or output.read_bytes() == expected
    assert num_killed > 0
    assert checkpoint.read_bytes() == content


def test_a_signal_leaves_neither_a_temporary_nor_a_traceback(
    checkpoint: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "harness.convert",
        str(checkpoint),
        "-o",
        str(tmp_path / "out.pt"),
    ]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:  # by nohup, which the command follows
            continue
        statuses = list[int]()
        # On busy cores some have ended before this process sees what they write.
        while 128 + number not in statuses:
            assert len(statuses) < 40
            with subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            ) as process:
                while process.poll() is None and not list(tmp_path.glob("*out.pt*")):
                    time.sleep(0.001)
                process.send_signal(number)
                assert process.stderr
                assert process.stderr.read() == b""
            statuses.append(process.returncode)
            assert not list(tmp_path.glob("*.part"))
            (tmp_path / "out.pt").unlink(missing_ok=True)


def test_a_file_size_limit_ends_with_a_line_and_status_4(checkpoint: Path, tmp_path: Path) -> None:
    """A limit that the kernel really enforces."""
    limited = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, -1));"
        f"sys.argv = ['convert', {str(checkpoint)!r}, '-o', {str(tmp_path / 'out.pt')!r}];"
        "runpy.run_module('harness.convert', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True)
    assert result.returncode == 4
    assert result.stderr.count("\n") == 1
    assert "File too large" in result.stderr
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_an_input_that_changes_while_it_is_read_is_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_pt(*arguments: object) -> write.Written:
        written = write.write_pt(*arguments)
        with checkpoint.open("r+b") as file:
            file.write(b"P")
        return written

    monkeypatch.setitem(conversion._WRITERS, ".pt", write_pt)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert(checkpoint, tmp_path / "out.pt")
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_an_output_that_exists_or_appears_meanwhile_is_kept_unless_forced(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.pt"

    def write_pt(*arguments: object) -> write.Written:
        written = write.write_pt(*arguments)
        output.write_text("mine")
        return written

    output.write_text("mine")
    with pytest.raises(UserError, match=r"out.pt exists; --force replaces it"):
        convert(checkpoint, output)
    assert output.read_text() == "mine"
    output.unlink()
    monkeypatch.setitem(conversion._WRITERS, ".pt", write_pt)
    with pytest.raises(UserError, match=r"out\.pt exists, since a moment ago; --force replaces"):
        convert(checkpoint, output)
    assert output.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "out.pt"]
    convert(checkpoint, output, force=True)
    assert len(torch.load(output)) == 8


def test_the_input_is_never_the_output(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link.pt").symlink_to(checkpoint)
    with pytest.raises(UserError, match="is the source"):
        convert(checkpoint, tmp_path / "link.pt", force=True)
