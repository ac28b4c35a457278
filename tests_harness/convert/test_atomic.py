"""The output appears whole or not at all, and the input is never touched."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from harness.convert import CheckpointError, conversion, convert, write
from harness.errors import UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_checkpoint.py"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.save(
        {"state_dict": {str(i): torch.rand(1000, 1000) for i in range(8)}}, tmp_path / "a.ckpt"
    )
    return tmp_path / "a.ckpt"


def test_kill_at_any_moment_leaves_no_partial_file(checkpoint: Path, tmp_path: Path) -> None:
    content, output = checkpoint.read_bytes(), tmp_path / "out.pt"
    command = [sys.executable, str(SCRIPT), str(checkpoint), "-o", str(output)]
    for _ in range(2):  # the second finds in memory what the first has read from the disk
        output.unlink(missing_ok=True)
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall_seconds = time.perf_counter() - start
    expected = output.read_bytes()
    num_killed = 0
    for i in range(12):
        output.unlink(missing_ok=True)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            time.sleep(wall_seconds * (i + 1) / 12)
            process.kill()
        num_killed += process.returncode == -signal.SIGKILL
        assert not output.exists() or output.read_bytes() == expected
    assert num_killed > 0
    assert checkpoint.read_bytes() == content


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_neither_a_temporary_nor_a_traceback(
    number: signal.Signals, checkpoint: Path, tmp_path: Path
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("whoever started the tests ignores it, as nohup does, and so does the command")
    command = [sys.executable, str(SCRIPT), str(checkpoint), "-o", str(tmp_path / "out.pt")]
    statuses = set[int]()
    num_tries = 0
    # On busy cores some have ended before this process sees what they write.
    while num_tries < 4 or (128 + number not in statuses and num_tries < 40):
        num_tries += 1
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            while process.poll() is None and not list(tmp_path.glob("*out.pt*")):
                time.sleep(0.001)
            process.send_signal(number)
            assert process.stderr
            assert process.stderr.read() == b""
        statuses.add(process.returncode)
        assert not list(tmp_path.glob("*.part"))
        (tmp_path / "out.pt").unlink(missing_ok=True)
    assert 128 + number in statuses


@pytest.mark.parametrize("force", [False, True])
def test_the_file_is_on_the_disk_before_its_name_and_then_the_name(
    force: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def fsync(fd: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")

    def replace(source: Path, target: Path) -> None:
        calls.append("name")
        rename(source, target)

    rename = os.replace if force else os.link
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, rename.__name__, replace)
    convert(checkpoint, tmp_path / "out.pt", force=force)
    assert calls == ["file", "name", "folder"]


@pytest.mark.parametrize("num_writes", [0, 1, 2, 5, 9])
def test_a_full_disk_leaves_nothing(
    num_writes: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        def __init__(self, file: BinaryIO) -> None:
            self.file, self.num_writes = file, 0

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, content: bytes) -> int:
            self.num_writes += 1
            if self.num_writes > num_writes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(content)

    def write_pt(file: BinaryIO, *arguments: object) -> None:
        write.write_pt(FullDisk(file), *arguments)

    monkeypatch.setitem(conversion._WRITERS, ".pt", write_pt)
    with pytest.raises(OSError, match="No space left"):
        convert(checkpoint, tmp_path / "out.pt")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="only writing would tell")
def test_a_disk_that_is_too_small_is_found_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "_copy", lambda *_: pytest.fail("this would fill the disk"))
    output = tmp_path / "out.safetensors"
    torch.save({"huge": torch.ones(1).expand(1 << 52)}, tmp_path / "a.ckpt")
    with pytest.raises(OSError, match=r"No space left|too large"):
        convert(tmp_path / "a.ckpt", output, max_expansion=1e30)
    torch.save({str(i): torch.ones(1).expand(1 << 60) for i in range(8)}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="larger than any file"):
        convert(tmp_path / "a.ckpt", output, max_expansion=1e30)
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_file_size_limit_ends_with_a_line_and_status_4(checkpoint: Path, tmp_path: Path) -> None:
    """A limit that the kernel really enforces."""
    limited = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, -1));"
        f"sys.argv = ['convert', {str(checkpoint)!r}, '-o', {str(tmp_path / 'out.pt')!r}];"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True)
    assert result.returncode == 4
    assert result.stderr.count("\n") == 1
    assert "File too large" in result.stderr
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]


@pytest.mark.parametrize("how", ["replaced", "written", "written and its time set back"])
def test_an_input_that_changes_while_it_is_read_is_refused(
    how: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_pt(*arguments: object) -> None:
        write.write_pt(*arguments)
        if how == "replaced":
            torch.save({"state_dict": {}}, tmp_path / "b")
            os.replace(tmp_path / "b", checkpoint)
        else:
            before = checkpoint.stat()
            with checkpoint.open("r+b") as file:
                file.write(b"P")
            if how != "written":
                os.utime(checkpoint, ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setitem(conversion._WRITERS, ".pt", write_pt)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert(checkpoint, tmp_path / "out.pt")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]


def test_a_failing_disk_is_found(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte that is not what was written is found before the file gets its name."""

    def write_pt(file: BinaryIO, *arguments: object) -> None:
        write.write_pt(file, *arguments)
        file.flush()
        os.pwrite(file.fileno(), b"\xff\xff\xff\xff", 20_000_000)

    monkeypatch.setitem(conversion._WRITERS, ".pt", write_pt)
    with pytest.raises(CheckpointError, match="4 was not written as it is in the source"):
        convert(checkpoint, tmp_path / "out.pt")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]


def test_an_existing_output_is_kept_unless_forced(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out.pt").write_text("mine")
    with pytest.raises(UserError, match=r"out.pt exists; --force replaces it"):
        convert(checkpoint, tmp_path / "out.pt")
    assert (tmp_path / "out.pt").read_text() == "mine"
    convert(checkpoint, tmp_path / "out.pt", force=True)
    assert torch.load(tmp_path / "out.pt").keys() == {str(i) for i in range(8)}


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("what", ["file", "dangling link"])
def test_an_output_that_appears_meanwhile_is_kept_unless_forced(
    what: str,
    has_links: bool,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a second call for the same output, which has looked for it before this one wrote it."""
    output = tmp_path / "out.pt"

    def write_pt(*arguments: object) -> None:
        write.write_pt(*arguments)
        if what == "file":
            output.write_text("mine")
        else:
            output.symlink_to("nowhere")

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:  # as on FAT
        monkeypatch.setattr(os, "link", link)
    convert(checkpoint, output)
    output.unlink()
    monkeypatch.setitem(conversion._WRITERS, ".pt", write_pt)
    with pytest.raises(UserError, match=r"out.pt exists, since a moment ago; --force replaces it"):
        convert(checkpoint, output)
    assert output.is_symlink() or output.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "out.pt"]
    output.unlink()
    convert(checkpoint, output, force=True)
    assert len(torch.load(output)) == 8


def test_the_input_is_never_the_output(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link.pt").symlink_to(checkpoint)
    with pytest.raises(UserError, match="is the source"):
        convert(checkpoint, tmp_path / "link.pt", force=True)


def test_a_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    report = convert(checkpoint, tmp_path / "out.pt", dry_run=True)
    assert len(report.tensors) == 8
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt"]
