"""What is not a checkpoint, or no longer one, is named in one line, and nothing is written."""

import json
import os
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from harness.convert import CheckpointError, convert
from harness.convert.checkpoint import Checkpoint

from .checkpoint_matrix import save_distributed


def refusal(path: Path, **options: object) -> str:
    """Return why a checkpoint is refused; assert that this is a line, and nothing is left."""
    before = sorted(os.listdir(path.parent))
    with pytest.raises(CheckpointError) as caught:
        convert(path, path.parent / "out.pt", **options)
    assert sorted(os.listdir(path.parent)) == before
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


def checkpoint(path: Path) -> Path:
    network = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))
    state = {"state_dict": network.state_dict(), "view": torch.rand(9), "epoch": 1}
    torch.save(state, path)
    return path


def test_one_flipped_byte_in_any_tensor_is_found(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "last.ckpt")
    content = path.read_bytes()
    with Checkpoint(path) as opened:
        state = opened.root["state_dict"]
    for name, tensor in state.items():
        for at in {0, tensor.num_bytes - 1}:
            damaged = bytearray(content)
            damaged[tensor.record.offset + at] ^= 16
            path.write_bytes(damaged)
            torch.load(path)  # which does not notice
            for options in ({}, {"dtype": "bfloat16"}):
                assert f"damaged: {name} " in refusal(path, **options)
    path.write_bytes(content.replace(b"0.weight", b"0.weighu", 1))
    assert "data.pkl does not match its checksum" in refusal(path)


def test_a_shard_that_is_damaged_short_or_missing_is_named(tmp_path: Path) -> None:
    save_distributed({"model": {"weight": torch.arange(999.0)}}, tmp_path / "dcp")
    (shard,) = (tmp_path / "dcp").glob("*.distcp")
    content = shard.read_bytes()
    at = content.index(torch.arange(500.0, 510.0).numpy().tobytes())
    shard.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    assert "damaged: weight does not match its checksum" in refusal(tmp_path / "dcp")
    shard.write_bytes(content[:-10])
    assert f"truncated: {shard.name}" in refusal(tmp_path / "dcp")
    shard.unlink()
    assert f"{shard.name} is missing; copy the whole folder" in refusal(tmp_path / "dcp")


def test_truncation_is_found(tmp_path: Path) -> None:
    state, rng = {"a": torch.rand(100), "b": torch.rand(100)}, random.Random(0)
    torch.save({"state_dict": state}, tmp_path / "zip.ckpt")
    torch.save(state, tmp_path / "legacy.ckpt", _use_new_zipfile_serialization=False)
    save_file(state, tmp_path / "a.safetensors")
    for path in sorted(tmp_path.iterdir()):
        content = path.read_bytes()
        for size in [1, 7, len(content) - 1, *(rng.randrange(2, len(content)) for _ in range(20))]:
            path.write_bytes(content[:size])
            refusal(path)
            refusal(path, dry_run=True)
        # Bytes that are missing in the middle put the first entry of a zip before the file.
        path.write_bytes(content[:50] + content[200:])
        message = refusal(path)
        assert "damaged" in message or "truncated" in message or path.suffix != ".ckpt"


def test_an_empty_file_a_pickle_and_what_others_have_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "the file is empty" in refusal(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"\x80\x04K\x01.")
    assert "a pickle that torch.save did not write" in refusal(tmp_path / "file")
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        archive.writestr("a.txt", "text")
    assert "a zip, but not one that torch.save writes" in refusal(tmp_path / "file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "net.pt")
    assert "TorchScript" in refusal(tmp_path / "net.pt")
    (tmp_path / "run.ckpt" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run.ckpt" / "latest").write_text("checkpoint")
    assert "run its zero_to_fp32.py" in refusal(tmp_path / "run.ckpt")


def rewritten(path: Path, change: Callable[[str, bytes], bytes], kind: int = 0) -> Path:
    """Write a zip again, with other contents."""
    with zipfile.ZipFile(path) as old:
        entries = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", kind) as new:
        for name, content in entries:
            new.writestr(name, change(name, content))
    return path


def test_a_zip_that_was_changed_is_refused(tmp_path: Path) -> None:
    """Compressed, big-endian, or with a tensor that would be given the bytes of the next one."""
    path = checkpoint(tmp_path / "last.ckpt")
    rewritten(path, lambda _, content: content, zipfile.ZIP_DEFLATED)
    assert "zipped again with compression; unzip it" in refusal(path)
    checkpoint(path)
    rewritten(path, lambda name, content: b"big" if name.endswith("byteorder") else content)
    assert "big-endian" in refusal(path)
    for geometry in (b"K\x09\x85", b"J\xff\xff\xff\xff\x85"):
        torch.save({"a": torch.ones(3), "b": torch.ones(99)}, path)
        rewritten(path, lambda _, content, g=geometry: content.replace(b"K\x03\x85", g, 1))
        assert "a tensor" in refusal(path)


def safetensors(path: Path, header: dict[str, object], content: bytes = bytes(8)) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def test_safetensors_places_have_no_overlaps_and_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for second in ([0, 4], [2, 6], [5, 9]):
        entries = {
            name: {"dtype": "U8", "shape": [4], "data_offsets": offsets}
            for name, offsets in {"a": [0, 4], "b": second}.items()
        }
        said = refusal(safetensors(path, entries, bytes(second[1])))
        assert "bytes of b are not where they should be" in said


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait for somebody to write into it."""
    os.mkfifo(tmp_path / "pipe.ckpt")
    assert "pipe.ckpt is not a regular file" in refusal(tmp_path / "pipe.ckpt")
