"""What the command prints, writes and returns: mistakes are one line and a status."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from harness.convert.__main__ import main

from .checkpoint_matrix import Net, lightning, prefixed, save_distributed, trained


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


def test_it_says_what_it_did_in_a_few_lines(folder: Path, run: Run) -> None:
    said = run("runs/last.ckpt", "-o", "weights.pt")
    assert (said.status, said.stderr) == (0, "")
    lines = said.stdout.splitlines()
    assert len(lines) <= 8
    assert "took      10 float32, 1 int64" in lines[1]
    assert "renamed   11, such as net._orig_mod.conv.weight -> conv.weight" in lines[2]
    assert lines[3].startswith("  left out  criterion.*: of the module around the network")
    assert "dropped" in lines[4]
    assert "optimizer_states" in lines[4]
    assert "verified  every byte" in lines[5]
    assert lines[6] == "  wrote     weights.pt"
    Net().load_state_dict(torch.load(folder / "weights.pt"))


def test_the_list_shows_every_tensor_and_writes_nothing(folder: Path, run: Run) -> None:
    (folder / "runs" / "last.weights.pt").write_text("mine")
    said = run("runs/last.ckpt", "--list")
    assert said.status == 0
    assert said.stdout.count("float32 (") == 10
    assert (folder / "runs" / "last.weights.pt").read_text() == "mine"
    assert len([*folder.rglob("*.pt")]) == 1


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
        ("runs/last.ckpt out.pt", 1, "out.pt does not exist; an output has -o before it"),
        ("runs/last.ckpt -o weights.bin", 1, "must end in one of .pt, .pth, .safetensors"),
        ("runs/last.ckpt -o no/weights.pt", 1, "no is not a folder"),
        ("runs/last.ckpt -o runs", 1, "runs is a folder; -o runs/last.pt names a file in it.\n"),
        ("runs/last.ckpt runs/best.ckpt -o a.pt", 1, "a.pt would be written more than once"),
        ("runs/last.ckpt --prefix nett", 3, "nothing is called nett.*; there is: criterion"),
        ("runs", 3, "runs: a folder without checkpoints"),
        ("runs/last.ckpt --dtype float64", 2, "invalid choice"),
        ("runs/last.ckpt -o /proc/out.pt", 4, "/proc/out.pt"),
    ]
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


def test_what_was_verified_is_said(tmp_path: Path, run: Run) -> None:
    """A file without checksums cannot tell whether it was damaged before."""
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    assert "verified  every byte\n" in run("a.pt").stdout
    assert "verified  nothing\n" in run("a.pt", "--no-verify", "--force").stdout
    save_file({"a": torch.ones(3)}, tmp_path / "a.pt")
    copied = "verified  the copy, byte for byte; the source states no checksums\n"
    assert copied in run("a.pt", "--force").stdout


def test_an_input_or_a_part_of_one_is_never_overwritten(folder: Path, run: Run) -> None:
    save_distributed({"weight": torch.ones(3)}, folder / "step_100")
    said = run("runs/last.ckpt", "-o", "step_100/meta.pt", "--force")
    assert "step_100/meta.pt is inside the checkpoint step_100" in said.stderr
    other = folder / "runs" / "last.weights.pt"
    other.write_bytes((folder / "runs" / "best.ckpt").read_bytes())
    before = other.read_bytes()
    said = run("runs/last.ckpt", "runs/last.weights.pt", "--force")
    assert said.status == 1
    assert "last.weights.pt, for runs/last.ckpt, is also an input" in said.stderr
    assert other.read_bytes() == before


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


@pytest.mark.parametrize("options", [[], ["-o", "out.safetensors", "--dtype", "bfloat16"]])
def test_memory_does_not_grow_with_the_checkpoint(options: list[str], tmp_path: Path) -> None:
    """A checkpoint of 200 MB, half of it in a layout that has to be gathered for safetensors."""
    state = {"a": torch.zeros(5_000, 5_000), "b": torch.zeros(5_000, 5_000).t()}
    torch.save(state, tmp_path / "large.ckpt")
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [
        sys.executable,
        "-c",
        code,
        sys.executable,
        "-m",
        "harness.convert",
        "large.ckpt",
        *options,
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert int(result.stdout.splitlines()[-1]) <= 64 * 1024
