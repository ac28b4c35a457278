"""What the command prints, writes and returns: mistakes are one line and a status."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from harness.convert import CheckpointError, conversion, convert
from harness.convert.__main__ import main

from .checkpoint_matrix import Net, lightning, prefixed, trained

COMMAND = [sys.executable, "-m", "harness.convert"]


class Said(NamedTuple):
    """What a command has returned and printed."""

    status: int
    stdout: str
    stderr: str


Run = Callable[..., Said]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, where the test's files are."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Said:
        try:
            status = main([*map(str, arguments)])
        except SystemExit as error:  # of argparse
            status = int(str(error.code))
        return Said(status, *capsys.readouterr())

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    network = trained(Net())
    state = lightning({**prefixed("net._orig_mod.", network), "criterion.weight": torch.ones(5)})
    for name in ("best", "last"):
        torch.save(state, tmp_path / "runs" / f"{name}.ckpt")
    return tmp_path


def test_it_says_what_it_did_in_a_few_lines_or_lists_it(folder: Path, run: Run) -> None:
    said = run("runs/last.ckpt", "-o", "weights.pt")
    assert (said.status, said.stderr) == (0, "")
    took, renamed, left_out, verified, wrote = said.stdout.splitlines()[1:]
    assert "took      10 float32, 1 int64" in took
    assert "renamed   11, such as net._orig_mod.conv.weight -> conv.weight" in renamed
    assert left_out.startswith("  left out  epoch, global_step, ")
    assert left_out.endswith(", optimizer_states, lr_schedulers, criterion.*")
    assert "verified  the copy with its source" in verified
    assert wrote == "  wrote     weights.pt"
    Net().load_state_dict(torch.load(folder / "weights.pt"))
    said = run("runs/last.ckpt", "--list")
    assert said.status == 0
    assert "  conv.weight  float32 (4, 3, 3, 3)  <- net._orig_mod.conv.weight" in said.stdout
    assert [path.name for path in folder.rglob("*.pt")] == ["weights.pt"]


def test_one_bad_input_does_not_stop_the_others(folder: Path, run: Run) -> None:
    (folder / "runs" / "bad.ckpt").write_text("not a checkpoint")
    said = run(*sorted((folder / "runs").iterdir()))
    assert said.status == 3
    assert said.stdout.count("wrote") == 2
    assert said.stderr.count("\n") == 1
    assert f"{folder}/runs/bad.ckpt: not a checkpoint" in said.stderr
    outputs = {path.name for path in (folder / "runs").glob("*.pt")}
    assert outputs == {"best.weights.pt", "last.weights.pt"}


def test_a_mistake_is_one_line_and_a_status_and_nothing_is_written(folder: Path, run: Run) -> None:
    mistakes: list[tuple[str, int, str]] = [
        ("nothing.ckpt", 1, "nothing.ckpt does not exist.\n"),
        ("runs/last.ckpt -o weights.bin", 1, "must end in one of .pt, .pth, .safetensors"),
        (
            "runs/last.ckpt runs/best.ckpt -o a.pt",
            1,
            "needs an output of its own, which is no input",
        ),
        ("runs/last.ckpt runs/last.pt", 1, "needs an output of its own"),
        ("runs/last.ckpt -o runs/last.pt", 1, "runs/last.pt exists; --force replaces it"),
        ("runs/last.ckpt --force -o link.pt", 1, "needs an output of its own"),
        ("runs/last.ckpt --prefix nett", 3, "nothing is called nett.*; --prefix '' --list shows"),
        (
            "runs",
            3,
            "runs: a folder that is no checkpoint itself, or no file at all; name a file\n",
        ),
        ("runs/last.ckpt --dtype float64", 2, "unrecognized arguments"),
        ("runs/last.ckpt -o /proc/out.pt", 4, "/proc/out.pt"),
    ]
    (folder / "runs" / "last.pt").write_bytes((folder / "runs" / "last.ckpt").read_bytes())
    (folder / "link.pt").symlink_to("runs/last.ckpt")
    before = sorted(folder.rglob("*"))
    for words, status, message in mistakes:
        said = run(*words.split())
        assert said.status == status, words
        assert message in said.stderr
        assert said.stderr.count("\n") == 1 or status == 2
        assert sorted(folder.rglob("*")) == before


def test_what_a_terminal_would_obey_is_nowhere_printed(tmp_path: Path, run: Run) -> None:
    evil = "a\x1b]0;title\x07\n\u202eb"
    (tmp_path / f"{evil}.bad").write_text("text")
    torch.save(
        {evil: {evil: torch.ones(1)}, "model": {evil: torch.ones(1)}}, tmp_path / f"{evil}.pt"
    )
    for arguments in (
        [f"{evil}.pt", "--list"],
        [f"{evil}.pt", "--key", f"{evil}x"],
        [f"{evil}.bad"],
        [f"{evil}.pt", "-o", f"/proc/{evil}.pt"],
    ):
        said = run(*arguments)
        assert all(line.isprintable() for line in (said.stdout + said.stderr).split("\n"))
        assert said.stderr.count("\n") <= 1


def test_of_a_runs_folder_the_best_checkpoint_is_taken(folder: Path, run: Run) -> None:
    (folder / "runs").rename(folder / "checkpoints")
    said = run(".")
    assert (said.status, said.stderr) == (0, "")
    assert said.stdout.endswith("wrote     checkpoints/best.weights.pt\n")
    (folder / "checkpoints" / "best.ckpt").unlink()
    assert run(".").stdout.endswith("wrote     checkpoints/last.weights.pt\n")


def test_a_start_imports_neither_torch_nor_numpy_and_escapes_names(folder: Path) -> None:
    torch.save({"é": torch.ones(1)}, folder / "é.pt")
    code = (
        "import runpy, sys; sys.argv = ['convert', 'runs/last.ckpt', 'é.pt', '--list'];"
        "import atexit; atexit.register(lambda: print(*sorted(sys.modules)));"
        "runpy.run_module('harness.convert', run_name='__main__')"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=True, env=environment
    )
    assert r"\xe9" in result.stdout
    modules = set(result.stdout.splitlines()[-1].split())
    assert "harness.convert" in modules
    assert not modules & {"torch", "numpy", "pytorch_lightning", "hydra", "omegaconf"}


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """A checkpoint of 200 MB, half of it in a layout that has to be gathered for safetensors."""
    state = {"a": torch.zeros(5_000, 5_000), "b": torch.zeros(5_000, 5_000).t()}
    torch.save(state, tmp_path / "large.ckpt")
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", code, *COMMAND, "large.ckpt", "-o", "out.safetensors"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert int(result.stdout.splitlines()[-1]) <= 64 * 1024


@pytest.fixture
def large(tmp_path: Path) -> Path:
    state = {str(i): torch.rand(1000, 1000) for i in range(8)}
    torch.save({"state_dict": state}, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_kill_at_any_moment_leaves_no_partial_file(large: Path, tmp_path: Path) -> None:
    content, output = large.read_bytes(), tmp_path / "out.pt"
    command = [*COMMAND, str(large), "-o", str(output)]
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
    assert large.read_bytes() == content


def test_a_signal_leaves_neither_a_temporary_nor_a_traceback(large: Path, tmp_path: Path) -> None:
    command = [*COMMAND, str(large), "-o", str(tmp_path / "out.pt")]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:  # by nohup, which the command follows
            continue
        statuses = list[int]()
        # On busy cores some have ended before this process sees what they write.
        while 128 + number not in statuses:
            assert len(statuses) < 40
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            with subprocess.Popen(command, **pipes) as process:
                while process.poll() is None and not list(tmp_path.glob("*out.pt*")):
                    time.sleep(0.001)
                process.send_signal(number)
                assert process.stderr
                assert process.stderr.read() == b""
            statuses.append(process.returncode)
            assert not list(tmp_path.glob("*.part"))
            (tmp_path / "out.pt").unlink(missing_ok=True)


def test_what_changes_meanwhile_is_noticed(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input that is written to, and an output that appears."""
    output, writer = tmp_path / "out.pt", conversion._WRITERS[".pt"]

    def write_pt(*arguments: object) -> dict[str, int]:
        checksums = writer(*arguments)
        change()
        return checksums

    monkeypatch.setitem(conversion._WRITERS, ".pt", write_pt)
    change = lambda: output.write_text("mine")  # noqa: E731  it is exchanged below
    with pytest.raises(FileExistsError, match=r"out\.pt"):
        convert(large, output)
    assert output.read_text() == "mine"
    change = lambda: large.write_bytes(b"PK")  # noqa: E731
    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert(large, output, force=True)
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "out.pt"]
    assert output.read_text() == "mine"
