"""A damaged checkpoint, or another file, ends with a message; nothing is written."""

import json
import os
import random
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from harness.convert import CheckpointError, convert
from harness.convert.checkpoint import Checkpoint

from .checkpoint_matrix import Net, differing, trained


def refusal(path: Path, **options: object) -> str:
    """Return the message that refuses a checkpoint; assert one line, and no file left."""
    before = sorted(os.listdir(path.parent))
    with pytest.raises(CheckpointError) as caught:
        convert(path, path.parent / "out.pt", **options)
    assert sorted(os.listdir(path.parent)) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


STATE = trained(Net()).state_dict()


def test_one_flipped_byte_in_any_tensor_is_found(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": STATE, "epoch": 1}, path)
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
    path.write_bytes(content.replace(b"bn.weight", b"bn.weighu", 1))
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


@pytest.mark.parametrize(
    ("old", "new", "compression", "said"),
    [
        (b"", b"", zipfile.ZIP_DEFLATED, "zipped again with compression. Unzip it"),
        (b"little", b"big", zipfile.ZIP_STORED, "big-endian"),
        # A tensor that would be given the bytes of the next one, or of none.
        (b"K\x03\x85", b"K\x09\x85", zipfile.ZIP_STORED, "a tensor reaches past the end"),
        (b"K\x03\x85", b"J\xff\xff\xff\xff\x85", zipfile.ZIP_STORED, "a tensor's shape"),
    ],
)
def test_a_zip_that_was_changed_is_refused(
    old: bytes, new: bytes, compression: int, said: str, tmp_path: Path
) -> None:
    torch.save({"a": torch.ones(3), "b": torch.ones(99)}, tmp_path / "a.ckpt")
    with (
        zipfile.ZipFile(tmp_path / "a.ckpt") as source,
        zipfile.ZipFile(tmp_path / "b.ckpt", "w", compression) as changed,
    ):
        for info in source.infolist():
            changed.writestr(info.filename, source.read(info).replace(old, new, 1))
    assert said in refusal(tmp_path / "b.ckpt")


def test_safetensors_places_have_no_overlaps_and_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for second in ([0, 4], [2, 6], [5, 9]):
        entries = {
            name: {"dtype": "U8", "shape": [4], "data_offsets": offsets}
            for name, offsets in {"a": [0, 4], "b": second}.items()
        }
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(second[1]))
        assert "bytes of b leave a gap or overlap others" in refusal(path)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    contents = (b"version https://git-lfs", b"\n<!DOCTYPE html><html>", b"\x80\x04K\x01.", b"")
    for content in contents:
        path.write_bytes(content)
        message = refusal(path)
        assert (
            "the file is not a checkpoint, or is damaged. It is neither safetensors nor" in message
        )
        assert message.endswith(f"begins with {content!r}")
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    assert "begins with b'\\x80\\x02\\x8a" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")
    assert "the zip file is not from torch.save" in refusal(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)
    assert "TorchScript" in refusal(path)
    os.mkfifo(tmp_path / "pipe.ckpt")  # opening it would wait for a writer
    assert "neither a checkpoint file, nor a run's folder" in refusal(tmp_path / "pipe.ckpt")


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
    assert differing(torch.load(tmp_path / "whole.pt"), STATE) == []
    assert "is one shard of a network" in refusal(shards[1])
    content = shards[1].read_bytes()
    shards[1].write_bytes(shards[0].read_bytes())
    assert "two shards hold tensors of the same name" in refusal(tmp_path / "hf")
    shards[1].write_bytes(content[:-1])
    assert "truncated" in refusal(tmp_path / "hf")
    shards[1].unlink()
    assert "nor a folder with all shards of a network" in refusal(tmp_path / "hf")


def test_one_process_s_share_is_not_the_network(tmp_path: Path) -> None:
    first, second = (tmp_path / f"consolidated.{rank:02}.pth" for rank in range(2))
    torch.save(STATE, first)
    convert(first, tmp_path / "whole.pt")  # of one process
    torch.save(STATE, second)
    assert "is one shard of a network" in refusal(first)


@pytest.mark.parametrize("zero", ["zero_pp_rank_{}_mp_rank_00", "bf16_zero_pp_rank_{}_mp_rank_00"])
def test_the_weights_of_deepspeed_are_in_one_file_beside_shards_of_the_optimizer(
    zero: str, tmp_path: Path
) -> None:
    """ZeRO-1 and -2 on two ranks. Of ZeRO-3 and of model parallelism a file is one shard."""
    folder = tmp_path / "global_step100"
    folder.mkdir()
    weights = folder / "mp_rank_00_model_states.pt"
    torch.save({"module": STATE, "optimizer": None, "dp_world_size": 2}, weights)
    for rank in range(2):
        moments = {"optimizer_state_dict": {"fp32_flat_groups": [torch.ones(3)]}}
        torch.save(moments, folder / f"{zero.format(rank)}_optim_states.pt")
    convert(weights, tmp_path / "out.pt")
    assert differing(torch.load(tmp_path / "out.pt"), STATE) == []
    assert "is one shard of a network" in refusal(folder / f"{zero.format(1)}_optim_states.pt")
    weights.rename(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")  # ZeRO-3 writes no other
    assert "one shard" in refusal(folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for rank in range(2):
        torch.save({"module": STATE}, folder / f"mp_rank_0{rank}_model_states.pt")
    assert "one shard" in refusal(weights)


def test_a_storage_of_two_types_is_refused(tmp_path: Path) -> None:
    """torch.load reads both tensors with the type of the first; torch.save writes no such file."""
    first, second = torch.ones(4), torch.ones(4, dtype=torch.int32)
    torch.save({"a": first, "b": second}, tmp_path / "two.pt")
    with (
        zipfile.ZipFile(tmp_path / "two.pt") as old,
        zipfile.ZipFile(path := tmp_path / "one.pt", "w") as new,
    ):
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):  # the key of the second storage becomes that of the first
                assert content.count(b"X\x01\x00\x00\x001") == 1
                content = content.replace(b"X\x01\x00\x00\x001", b"X\x01\x00\x00\x000")
            new.writestr(name, content)
    assert torch.load(path)["b"].dtype == torch.float32
    assert "data/0 is both float32 and int32" in refusal(path)
