"""What is no checkpoint, no longer one, or a part of one is named in a line; nothing is written."""

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

from .checkpoint_matrix import Net, same, trained


def refusal(path: Path, **options: object) -> str:
    """Return why a checkpoint is refused; assert that this is a line, and nothing is left."""
    before = sorted(os.listdir(path.parent))
    with pytest.raises(CheckpointError) as caught:
        convert(path, path.parent / "out.pt", **options)
    assert sorted(os.listdir(path.parent)) == before
    assert "\n" not in str(caught.value)
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
            assert f"damaged: {name} " in refusal(path)
    path.write_bytes(content.replace(b"0.weight", b"0.weighu", 1))
    assert "data.pkl does not match its checksum" in refusal(path)


def test_truncation_is_found(tmp_path: Path) -> None:
    state, rng = {"a": torch.rand(100), "b": torch.rand(100)}, random.Random(0)
    torch.save({"state_dict": state}, tmp_path / "zip.ckpt")
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
        assert "damaged" in message or "truncated" in message


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


def test_safetensors_places_have_no_overlaps_and_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for second in ([0, 4], [2, 6], [5, 9]):
        entries = {
            name: {"dtype": "U8", "shape": [4], "data_offsets": offsets}
            for name, offsets in {"a": [0, 4], "b": second}.items()
        }
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(second[1]))
        assert "bytes of b are not where they should be" in refusal(path)


STATE = trained(Net()).state_dict()


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    contents = (b"version https://git-lfs", b"\n<!DOCTYPE html><html>", b"\x80\x04K\x01.", b"")
    for content in contents:
        path.write_bytes(content)
        message = refusal(path)
        assert "not a checkpoint, or a damaged one: neither safetensors nor" in message
        assert message.endswith(f"begins with {content!r}")
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    assert "it begins with b'\\x80\\x02\\x8a" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")
    assert "a zip, but none of torch.save" in refusal(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)
    assert "TorchScript" in refusal(path)
    os.mkfifo(tmp_path / "pipe.ckpt")  # opening it would wait for somebody to write into it
    assert "or no file at all; name a file" in refusal(tmp_path / "pipe.ckpt")


def test_a_folder_of_torchs_distributed_checkpoint_gets_torchs_command(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    assert f"format_utils dcp_to_torch {tmp_path} FILE" in refusal(tmp_path)


def test_shards_become_the_whole_network_or_are_refused(tmp_path: Path) -> None:
    """As Hugging Face saves them; a missing, double or damaged one is never passed over."""
    shards = [tmp_path / "hf" / f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    shards[0].parent.mkdir()
    for i, shard in enumerate(shards):
        save_file({name: STATE[name] for name in sorted(STATE)[i::3]}, shard)
    convert(tmp_path / "hf", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt")
    Net().load_state_dict(state)
    assert all(same(value, STATE[name]) for name, value in state.items())
    assert "a part of a network, by its name" in refusal(shards[1])
    content = shards[1].read_bytes()
    shards[1].write_bytes(shards[0].read_bytes())
    assert "two shards hold tensors of one name" in refusal(tmp_path / "hf")
    shards[1].write_bytes(content[:-1])
    assert "truncated" in refusal(tmp_path / "hf")
    shards[1].unlink()
    assert "a folder that is no checkpoint itself, or no file at all; name a file" in refusal(
        tmp_path / "hf"
    )


@pytest.mark.parametrize("stem", ["consolidated.{:02}.pth", "mp_rank_{:02}_model_states.pt"])
def test_one_process_s_share_is_not_the_network(stem: str, tmp_path: Path) -> None:
    first, second = (tmp_path / stem.format(rank) for rank in range(2))
    torch.save(STATE, first)
    convert(first, tmp_path / "whole.pt")  # of one process
    torch.save(STATE, second)
    assert "a part of a network, by its name" in refusal(first)
