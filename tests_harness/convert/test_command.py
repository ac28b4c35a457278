import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from .checkpoint_matrix import Net, lightning, prefixed, save_distributed, trained

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_checkpoint.py"


def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    network = trained(Net())
    state = lightning({**prefixed("net._orig_mod.", network), "criterion.weight": torch.ones(5)})
    for name in ("best", "last"):
        torch.save(state, tmp_path / "runs" / f"{name}.ckpt")
    return tmp_path


def test_it_says_what_it_did_in_a_few_lines(folder: Path) -> None:
    result = run("runs/last.ckpt", "-o", "weights.pt", folder=folder)
    assert result.returncode == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) <= 8
    assert "took      10 float32, 1 int64" in lines[1]
    assert "renamed   11, such as net._orig_mod.conv.weight -> conv.weight" in lines[2]
    assert "optimizer_states" in lines[3]
    assert "criterion.*" in lines[3]
    assert "verified  every byte" in lines[4]
    assert lines[5] == "  wrote     weights.pt"
    Net().load_state_dict(torch.load(folder / "weights.pt"))


def test_the_list_shows_every_tensor_and_writes_nothing(folder: Path) -> None:
    result = run("runs/last.ckpt", "--list", folder=folder)
    assert result.stdout.count("float32 (") == 10
    assert not list(folder.rglob("*.pt"))


def test_json_is_for_programs(folder: Path) -> None:
    result = run("runs", "missing.ckpt", "--json", "-o", "{stem}.safetensors", folder=folder)
    best, last, missing = json.loads(result.stdout)
    assert best["output"] == "best.safetensors"
    assert last["tensors"]["conv.bias"] == {
        "source": "net._orig_mod.conv.bias",
        "dtype": "float32",
        "shape": [4],
    }
    assert missing["status"] == result.returncode == 1


def test_a_folder_is_converted_beside_its_checkpoints_and_only_once(folder: Path) -> None:
    assert run("runs", folder=folder).returncode == 0
    outputs = {path.name for path in (folder / "runs").glob("*.pt")}
    assert outputs == {"best.weights.pt", "last.weights.pt"}
    assert run("runs", "--force", folder=folder).stdout.count("wrote") == 2


def test_one_bad_input_does_not_stop_the_others(folder: Path) -> None:
    (folder / "runs" / "bad.ckpt").write_text("not a checkpoint")
    result = run("runs", folder=folder)
    assert result.returncode == 3
    assert result.stdout.count("wrote") == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: runs/bad.ckpt: not a checkpoint")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nothing.ckpt"], 1, "nothing.ckpt does not exist"),
        (["runs/last.ckpt", "-o", "weights.bin"], 1, "must end in one of .pt, .pth, .safetensors"),
        (["runs/last.ckpt", "-o", "no/weights.pt"], 1, "no is not a folder"),
        (["runs", "-o", "weights.pt"], 1, "weights.pt would be written more than once"),
        (
            ["runs/last.ckpt", "--prefix", "nett"],
            3,
            "nothing is called nett.*; there is: criterion",
        ),
        (["runs/last.ckpt", "--dtype", "float64"], 2, "invalid choice"),
        (["runs/last.ckpt", "-o", "/proc/out.pt"], 4, "/proc/out.pt"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(
    arguments: list[str], status: int, message: str, folder: Path
) -> None:
    result = run(*arguments, folder=folder)
    assert result.returncode == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    if status != 2:
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "outputs"),
    [
        (["runs/last.ckpt", "out.pt"], ["out.pt"]),
        (["runs/last.ckpt", "out.safetensors", "--dtype", "float16"], ["out.safetensors"]),
        (["--force", "runs/last.ckpt", "new folder/out.pt"], ["new folder/out.pt"]),
        (["runs/last.ckpt", "weights"], ["weights.pt"]),
        (["runs/last.ckpt", "new/"], ["new/last.pt"]),
        (["runs/last.ckpt", "empty"], ["empty/last.pt"]),
        (["runs/last.ckpt", "runs/best.ckpt", "out.pth"], ["best.pth", "last.pth"]),
        (["runs", "empty"], ["empty/best.pt", "empty/last.pt"]),
    ],
)
def test_an_output_as_of_cp_is_refused_with_the_line_to_type(
    arguments: list[str], outputs: list[str], folder: Path
) -> None:
    (folder / "empty").mkdir()
    before = sorted(folder.rglob("*"))
    result = run(*arguments, folder=folder)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
    line = result.stderr.strip().partition("has -o before it: ")[2]
    line = line.replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(["bash", "-c", line], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    assert all((folder / output).is_file() for output in outputs)
    assert len(list(folder.rglob("*.*"))) == 2 + len(outputs)


def test_an_output_that_is_a_folder_is_refused_with_the_option_to_type(folder: Path) -> None:
    (folder / "my out").mkdir()
    result = run("runs/last.ckpt", "-o", "my out", folder=folder)
    assert result.stderr == "error: my out is a folder; -o 'my out/last.pt' names a file in it.\n"
    assert run("runs/last.ckpt", "-o", "my out/last.pt", folder=folder).returncode == 0


def test_what_a_terminal_would_obey_is_nowhere_printed(tmp_path: Path) -> None:
    evil = "a\x1b]0;title\x07\n\u202eb"
    (tmp_path / f"{evil}.bad").write_text("text")
    torch.save(
        {evil: {evil: torch.ones(1)}, "model": {evil: torch.ones(1)}}, tmp_path / f"{evil}.pt"
    )
    calls = [
        [f"{evil}.pt"],
        [f"{evil}.pt", "--list"],
        [f"{evil}.pt", "--key", evil, "--list"],
        [f"{evil}.pt", "--key", f"{evil}x"],
        [f"{evil}.pt", "--prefix", evil],
        [f"{evil}.pt"],
        [f"{evil}.bad"],
        [f"{evil}.none"],
        [f"{evil}.pt", f"{evil}.out"],
        [f"{evil}.pt", "-o", f"/proc/{evil}.pt"],
        [f"{evil}.pt", "-o", f"{evil}/a.pt"],
        [f"{evil}.pt", f"{evil}.bad", "-o", "a.pt"],
    ]
    for arguments in calls:
        result = run(*arguments, folder=tmp_path)
        assert all(line.isprintable() for line in (result.stdout + result.stderr).split("\n"))
        assert result.stderr.count("\n") <= 1
    result = run(f"{evil}.pt", "--list", "--json", folder=tmp_path)
    assert json.loads(result.stdout)[0]["tensors"].keys() == {evil}


@pytest.mark.parametrize("source", ["pt", "zeros", "legacy", "safetensors"])
def test_what_was_verified_is_said(source: str, tmp_path: Path) -> None:
    """A file without checksums cannot tell whether it was damaged before."""
    state, path = {"a": torch.ones(3), "b": torch.empty(0)}, tmp_path / "a.pt"
    if source == "safetensors":
        save_file(state, path)
    elif source == "zeros":
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(state, path)
        finally:
            torch.serialization.set_crc32_options(True)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=source == "pt")
    said = (
        "every byte"
        if source == "pt"
        else "the copy, byte for byte; the source states no checksums"
    )
    assert f"verified  {said}\n" in run("a.pt", folder=tmp_path).stdout


def test_neither_torch_nor_numpy_is_imported(folder: Path) -> None:
    code = (
        f"import runpy, sys; sys.argv = ['convert', 'runs/last.ckpt']; sys.path[:0] = [];"
        f"import atexit; atexit.register(lambda: print(*sorted(sys.modules)));"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=True
    )
    modules = set(result.stdout.splitlines()[-1].split())
    assert "harness.convert" in modules
    assert not modules & {"torch", "numpy", "pytorch_lightning", "hydra", "omegaconf"}


@pytest.mark.parametrize("options", [[], ["--dtype", "bfloat16"], ["-o", "out.safetensors"]])
def test_memory_does_not_grow_with_the_checkpoint(options: list[str], folder: Path) -> None:
    """A checkpoint of 200 MB, half of it in a layout that has to be gathered for safetensors."""
    state = {"a": torch.zeros(5_000, 5_000), "b": torch.zeros(5_000, 5_000).t()}
    torch.save(state, folder / "large.ckpt")
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", code, sys.executable, str(SCRIPT), "large.ckpt", *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
    assert int(result.stdout.splitlines()[-1]) <= 64 * 1024


def test_an_output_inside_a_distributed_checkpoint_is_refused(folder: Path) -> None:
    save_distributed({"weight": torch.ones(3)}, folder / "step_100")
    result = run("runs/last.ckpt", "-o", "step_100/meta.pt", folder=folder)
    assert "step_100/meta.pt is inside the checkpoint step_100" in result.stderr


def test_an_input_is_never_overwritten_by_the_output_of_another(folder: Path) -> None:
    (folder / "last.weights.pt").write_bytes((folder / "runs" / "best.ckpt").read_bytes())
    (folder / "last.ckpt").write_bytes((folder / "runs" / "last.ckpt").read_bytes())
    os.link(folder / "last.weights.pt", folder / "linked.pt")
    before = (folder / "last.weights.pt").read_bytes()
    for arguments in (["last.weights.pt"], ["linked.pt", "--dtype", "float16"]):
        result = run("last.ckpt", *arguments, "--force", folder=folder)
        assert result.returncode == 1
        assert "last.weights.pt, for last.ckpt, is also an input" in result.stderr
    assert (folder / "last.weights.pt").read_bytes() == before


def test_a_distributed_checkpoint_is_converted_from_within(tmp_path: Path) -> None:
    source = tmp_path / "step=1-loss=0.12"
    save_distributed({"weight": torch.ones(3)}, source)
    assert run(".", folder=source).returncode == 0
    assert (tmp_path / "step=1-loss=0.12.weights.pt").is_file()
    result = run(".", "-o", "meta.pt", "--force", folder=source)
    assert result.returncode == 1
    assert "meta.pt is inside the checkpoint" in result.stderr
    assert run("..", "--force", folder=source).stdout.count("wrote") == 1


def test_a_folder_search_finds_all_but_its_own_outputs(tmp_path: Path) -> None:
    save_distributed({"weight": torch.ones(3)}, tmp_path / "runs" / "step_100")
    for name in ("best.weights.ckpt", "x.pt", "x.ckpt", "alone.weights.pt"):
        torch.save({"weight": torch.ones(3)}, tmp_path / "runs" / name)
    expected = [
        "alone.weights.weights.pt",
        "best.weights.weights.pt",
        "step_100.weights.pt",
        "x.ckpt.weights.pt",
        "x.pt.weights.pt",
    ]
    for _ in range(2):
        result = run("runs", "--force", folder=tmp_path)
        assert result.stdout.count("wrote") == 5
        outputs = {path.name for path in (tmp_path / "runs").glob("*.weights.pt")}
        assert sorted(outputs - {"alone.weights.pt"}) == expected
    result = run("runs", "-o", "{stem}.pt", folder=tmp_path)
    assert "for runs/x.ckpt and for runs/x.pt; convert one at a time" in result.stderr


def test_looking_does_not_need_a_free_output(folder: Path) -> None:
    (folder / "runs" / "last.weights.pt").write_text("mine")
    for option in ("--list", "--dry-run"):
        assert run("runs/last.ckpt", option, folder=folder).returncode == 0
    assert (folder / "runs" / "last.weights.pt").read_text() == "mine"


def test_programs_get_json_of_mistakes_too(folder: Path) -> None:
    result = run("runs", "-o", "a.pt", "--json", folder=folder)
    assert result.returncode == 1
    assert json.loads(result.stdout)[0]["status"] == 1


def test_names_that_the_terminal_cannot_show_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    torch.save({"é": torch.ones(1)}, tmp_path / "é.pt")
    result = run("é.pt", "--list", folder=tmp_path)
    assert result.returncode == 0
    assert r"\xe9" in result.stdout


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    torch.save({f"layer{i}": torch.ones(1) for i in range(5000)}, tmp_path / "a.pt")
    command = [sys.executable, str(SCRIPT), "a.pt", "--list"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("prefix", ["net", "net.", "net._orig_mod"])
def test_a_prefix_may_be_written_as_it_is_in_the_file(prefix: str, folder: Path) -> None:
    assert run("runs/last.ckpt", "-o", "a.pt", "--prefix", prefix, folder=folder).returncode == 0
    Net().load_state_dict(torch.load(folder / "a.pt"))
