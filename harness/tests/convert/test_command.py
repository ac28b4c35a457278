"""The command's output, files and status: a mistake is one line and a status."""

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

from .checkpoint_matrix import Net, below, lightning, trained

COMMAND = [sys.executable, "-m", "harness.convert"]


class Said(NamedTuple):
    """The status and the output of a command."""

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
    """A run's folder, of which best and last are the same."""
    (tmp_path / "checkpoints").mkdir()
    state = below("net._orig_mod.", trained(Net())) | {"criterion.weight": torch.ones(5)}
    for name in ("best", "last"):
        torch.save(lightning(state), tmp_path / "checkpoints" / f"{name}.ckpt")
    return tmp_path


def test_it_says_what_it_did_in_a_few_lines_or_lists_it(folder: Path, run: Run) -> None:
    said = run("checkpoints/last.ckpt", "-o", "weights.pt")
    assert (said.status, said.stderr) == (0, "")
    took, renamed, left_out, verified, wrote = said.stdout.splitlines()[1:]
    assert "tensors      10 float32, 1 int64" in took
    assert "renamed      11, such as net._orig_mod.conv.weight -> conv.weight" in renamed
    assert left_out.startswith("  left out     epoch, global_step, ")
    assert left_out.endswith(", optimizer_states, lr_schedulers, criterion.*")
    assert "verified     the output equals the source" in verified
    assert wrote == "  wrote        weights.pt"
    Net().load_state_dict(torch.load(folder / "weights.pt"))
    said = run("checkpoints/last.ckpt", "--list")
    assert said.status == 0
    assert "  conv.weight  float32 (4, 3, 3, 3)  <- net._orig_mod.conv.weight" in said.stdout
    assert [path.name for path in folder.rglob("*.pt")] == ["weights.pt"]


def test_one_bad_input_does_not_stop_the_others(folder: Path, run: Run) -> None:
    (folder / "checkpoints" / "bad.ckpt").write_text("not a checkpoint")
    said = run(*sorted((folder / "checkpoints").iterdir()))
    assert said.status == 3
    assert said.stderr.count("\n") == 1
    assert (
        f"{folder}/checkpoints/bad.ckpt: the file is not a checkpoint, or is damaged" in said.stderr
    )
    outputs = {path.name for path in (folder / "checkpoints").glob("*.pt")}
    assert outputs == {"best.weights.pt", "last.weights.pt"}


def test_of_a_runs_folder_the_best_checkpoint_is_taken(folder: Path, run: Run) -> None:
    assert run(".").stdout.endswith("wrote        checkpoints/best.weights.pt\n")
    (folder / "checkpoints" / "best.ckpt").unlink()
    assert run(".").stdout.endswith("wrote        checkpoints/last.weights.pt\n")


MISTAKES = (
    ("nothing.ckpt", 1, "nothing.ckpt does not exist.\n"),
    ("last.ckpt -o weights.bin", 1, "must end in one of .pt, .pth, .safetensors"),
    ("last.ckpt -o .", 1, ". is a folder. Name a file in it: -o weights.pt"),
    ("last.ckpt best.ckpt -o a.pt", 1, "Two inputs would write the same output, or an output"),
    ("last.ckpt last.pt", 1, "an output is also an input. Convert one checkpoint per command"),
    ("last.ckpt --force -o link.pt", 1, "an output is also an input"),
    ("last.ckpt -o last.pt", 1, "last.pt exists already. --force replaces it."),
    ("last.ckpt --prefix nett", 3, "no tensor is named nett.*. The names begin with net"),
    (
        ".",
        3,
        ". is neither a checkpoint file, nor a run's folder, nor a folder with all shards of a "
        "network. Name a file\n",
    ),
    ("last.ckpt --dtype float64", 2, "unrecognized arguments"),
    ("last.ckpt -o /proc/out.pt", 4, "/proc/out.pt"),
)


def test_a_mistake_is_one_line_and_a_status_and_nothing_is_written(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("checkpoints")
    Path("last.pt").write_bytes(Path("last.ckpt").read_bytes())
    Path("link.pt").symlink_to("last.ckpt")
    before = sorted(folder.rglob("*"))
    for words, status, message in MISTAKES:
        said = run(*words.split())
        assert said.status == status, words
        assert message in said.stderr
        assert said.stderr.count("\n") == 1 or status == 2
        assert sorted(folder.rglob("*")) == before


def test_what_a_terminal_would_obey_is_nowhere_printed(tmp_path: Path, run: Run) -> None:
    evil, one = "a\x1b]0;title\x07\n\u202eb", torch.ones(1)
    (tmp_path / f"{evil}.bad").write_text("text")
    torch.save({evil: {evil: one}, "model": {evil: one}}, tmp_path / f"{evil}.pt")
    for arguments in (
        [f"{evil}.pt", "--list"],
        [f"{evil}.pt", "--key", f"{evil}x"],
        [f"{evil}.bad"],
        [f"{evil}.pt", "-o", f"/proc/{evil}.pt"],
    ):
        said = run(*arguments)
        assert all(line.isprintable() for line in (said.stdout + said.stderr).split("\n"))
        assert said.stderr.count("\n") <= 1


def test_a_start_imports_neither_torch_nor_numpy_and_escapes_names(folder: Path) -> None:
    torch.save({"é": torch.ones(1)}, folder / "é.pt")
    code = (
        "import runpy, sys; sys.argv = ['convert', 'checkpoints/last.ckpt', 'é.pt', '--list'];"
        "import atexit; atexit.register(lambda: print(*sorted(sys.modules)));"
        "runpy.run_module('harness.convert', run_name='__main__')"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    ).stdout
    assert r"\xe9" in said
    modules = set(said.splitlines()[-1].split())
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
    torch.save({str(i): torch.rand(1000, 1000) for i in range(8)}, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_leaves_no_partial_file_and_no_traceback(
    name: str, large: Path, tmp_path: Path
) -> None:
    number, output = signal.Signals[name], tmp_path / "out.pt"
    if signal.getsignal(number) is signal.SIG_IGN:  # by nohup, which the command follows
        return
    command = [*COMMAND, str(large), "-o", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    content, expected = large.read_bytes(), output.read_bytes()
    ending, num_ended = -number if name == "SIGKILL" else 128 + number, 0
    # On busy cores some have ended before this process sees what they write.
    for i in range(40):
        for path in tmp_path.glob("*out.pt*"):
            path.unlink()
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as process:
            while process.poll() is None and not list(tmp_path.glob(".out.pt*")):
                time.sleep(0.001)
            time.sleep(0.002 * i)
            process.send_signal(number)
            assert process.stderr
            assert process.stderr.read() == b""
        assert not output.exists() or output.read_bytes() == expected
        assert name == "SIGKILL" or not list(tmp_path.glob("*.part"))
        num_ended += process.returncode == ending
        if num_ended == (5 if name == "SIGKILL" else 1):
            break
    assert num_ended
    assert large.read_bytes() == content


@pytest.mark.parametrize("what", ["output", "input"])
def test_what_another_process_writes_meanwhile_is_noticed(
    what: str, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, writer = tmp_path / "out.pt", conversion._WRITERS[".pt"]

    def write_pt(*arguments: object) -> dict[str, int]:
        checksums = writer(*arguments)
        (output if what == "output" else large).write_bytes(b"mine")
        return checksums

    monkeypatch.setitem(conversion._WRITERS, ".pt", write_pt)
    said = r"out\.pt" if what == "output" else "changed while it was read"
    with pytest.raises((FileExistsError, CheckpointError), match=said):
        convert(large, output)
    left = {"output": ["a.ckpt", "out.pt"], "input": ["a.ckpt"]}[what]
    assert sorted(os.listdir(tmp_path)) == left
    assert what == "input" or output.read_text() == "mine"
