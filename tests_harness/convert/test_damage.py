"""What is not a checkpoint, or no longer one, is named in one line, and nothing is written."""

import io
import json
import os
import random
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.convert import CheckpointError, convert
from harness.convert.read import Checkpoint

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


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
def test_one_flipped_byte_in_any_tensor_is_found(options: dict[str, str], tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "last.ckpt")
    content = path.read_bytes()
    with Checkpoint(path) as opened:
        state = opened.root["state_dict"]
    for name, tensor in state.items():
        for at in {0, tensor.num_bytes // 2, tensor.num_bytes - 1}:
            damaged = bytearray(content)
            damaged[tensor.record.offset + at] ^= 16
            path.write_bytes(damaged)
            torch.load(path)  # which does not notice
            assert f"damaged: {name.replace('state_dict.', '')} " in refusal(path, **options)


@pytest.mark.parametrize("at", [0, 3_000, 3_999])
def test_a_flipped_byte_beside_a_view_is_found(at: int, tmp_path: Path) -> None:
    """The checksum is that of the whole storage, of which only a part is taken."""
    torch.save({"view": torch.arange(1000.0)[400:500]}, tmp_path / "last.ckpt")
    content = bytearray((tmp_path / "last.ckpt").read_bytes())
    with Checkpoint(tmp_path / "last.ckpt") as opened:
        content[opened.root["view"].record.offset + at] ^= 1
    (tmp_path / "last.ckpt").write_bytes(content)
    assert "damaged: view does not match its checksum" in refusal(tmp_path / "last.ckpt")


def test_a_flipped_byte_in_a_shard_is_found(tmp_path: Path) -> None:
    save_distributed({"model": {"weight": torch.arange(999.0)}}, tmp_path / "dcp")
    (shard,) = (tmp_path / "dcp").glob("*.distcp")
    content = shard.read_bytes()
    at = content.index(torch.arange(500.0, 510.0).numpy().tobytes())
    shard.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    assert "damaged: weight does not match its checksum" in refusal(tmp_path / "dcp")


def test_a_flipped_byte_in_the_pickle_is_found(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "last.ckpt")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"0.weight", b"0.weighu", 1))
    assert "data.pkl does not match its checksum" in refusal(path)


@pytest.mark.parametrize("legacy", [False, True])
def test_truncation_is_found(legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    state = {"state_dict": {"a": torch.rand(100), "b": torch.rand(100)}}
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    content = path.read_bytes()
    rng = random.Random(0)
    for size in [1, 7, len(content) - 1, *(rng.randrange(2, len(content)) for _ in range(40))]:
        path.write_bytes(content[:size])
        refusal(path)
        refusal(path, dry_run=True)


def test_a_truncated_safetensors_file_is_found(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.rand(100)}, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[:-1])
    assert "truncated" in refusal(tmp_path / "a.safetensors")
    assert "truncated" in refusal(tmp_path / "a.safetensors", dry_run=True)


def test_a_legacy_storage_of_another_length_is_found(tmp_path: Path) -> None:
    torch.save({"a": torch.rand(7)}, tmp_path / "a", _use_new_zipfile_serialization=False)
    content = bytearray((tmp_path / "a").read_bytes())
    assert content[-36:-28] == (7).to_bytes(8, "little")
    content[-36] = 6
    (tmp_path / "a").write_bytes(content)
    assert "truncated or damaged" in refusal(tmp_path / "a", dry_run=True)


def test_a_shard_file_that_is_missing_or_short_is_named(tmp_path: Path) -> None:
    save_distributed({"model": {"weight": torch.arange(999.0)}}, tmp_path / "dcp")
    (shard,) = (tmp_path / "dcp").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-10])
    assert f"truncated: {shard.name}" in refusal(tmp_path / "dcp")
    shard.unlink()
    assert f"{shard.name} is missing; copy the whole folder" in refusal(tmp_path / "dcp")


def test_a_recompressed_zip_is_named(tmp_path: Path) -> None:
    """With mmap=True torch.load would give the compressed bytes as numbers."""
    path = checkpoint(tmp_path / "last.ckpt")
    with zipfile.ZipFile(path) as old:
        entries = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in entries:
            new.writestr(name, content)
    assert "zipped again with compression; unzip it" in refusal(path)


def test_what_is_not_a_checkpoint_is_named(tmp_path: Path) -> None:
    def refused(content: bytes) -> str:
        (tmp_path / "file").write_bytes(content)
        return refusal(tmp_path / "file")

    assert "the file is empty" in refused(b"")
    assert "a pickle that torch.save did not write" in refused(b"\x80\x04K\x01.")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")
    assert "a zip, but not one that torch.save writes" in refused(file.getvalue())


def test_torchscript_is_named(tmp_path: Path) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "net.pt")
    assert "TorchScript" in refusal(tmp_path / "net.pt")


def test_a_deepspeed_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.ckpt" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run.ckpt" / "latest").write_text("checkpoint")
    assert "run its zero_to_fp32.py" in refusal(tmp_path / "run.ckpt")


def test_a_checkpoint_without_weights_lists_what_it_holds(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "G": {"a": torch.ones(1)}, "D": {"a": torch.ones(1)}}, tmp_path / "a")
    message = refusal(tmp_path / "a")
    assert "it holds: epoch (int), G (dict of 1), D (dict of 1)" in message
    assert "no weights at --key E" in refusal(tmp_path / "a", key="E")


@pytest.mark.parametrize("geometry", [b"K\x09\x85", b"J\xff\xff\xff\xff\x85", b"(K\x02K\x01t"])
def test_a_tensor_that_does_not_fit_its_storage_is_refused(geometry: bytes, tmp_path: Path) -> None:
    """It would be given the bytes of the next one."""
    torch.save({"a": torch.ones(3), "b": torch.ones(99)}, tmp_path / "a")
    with zipfile.ZipFile(tmp_path / "a") as old:
        entries = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(tmp_path / "a", "w") as new:
        for name, content in entries:
            assert not name.endswith("data.pkl") or b"K\x03\x85" in content
            new.writestr(name, content.replace(b"K\x03\x85", geometry, 1))
    assert "a tensor" in refusal(tmp_path / "a")


def test_what_a_terminal_would_obey_is_escaped(tmp_path: Path) -> None:
    torch.save({"a\n\x1b[2J": torch.empty(3, device="meta")}, tmp_path / "a")
    assert r"a\n\x1b[2J is not a dense tensor" in refusal(tmp_path / "a")
    torch.save({"a\n\x1b[2J": torch.ones(3), "b\r": 1}, tmp_path / "a")
    report = str(convert(tmp_path / "a", tmp_path / "out.pt"))
    assert all(line.isprintable() for line in report.splitlines())
    assert torch.load(tmp_path / "out.pt").keys() == {"a\n\x1b[2J"}


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "last.ckpt")
    content = path.read_bytes()
    with zipfile.ZipFile(path, "w") as new, zipfile.ZipFile(io.BytesIO(content)) as old:
        for info in old.infolist():
            is_order = info.filename.endswith("byteorder")
            new.writestr(info.filename, b"big" if is_order else old.read(info))
    assert "big-endian" in refusal(path)


@pytest.mark.parametrize("offset", [1 << 40, (1 << 64) - 2])
def test_a_zip_directory_that_points_outside_the_file_is_named(offset: int, tmp_path: Path) -> None:
    """Mutated files led here: the second number is too large for the system's calls."""
    path = checkpoint(tmp_path / "last.ckpt")
    with zipfile.ZipFile(path, "a") as archive:
        archive.infolist()[0].header_offset = offset
        archive.comment = b"written again"
    assert "damaged: data.pkl cannot be read" in refusal(path)


def safetensors(path: Path, header: dict[str, object], content: bytes = bytes(8)) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    return path


def test_a_safetensors_file_is_known_whatever_the_length_of_its_header(tmp_path: Path) -> None:
    """The length comes first, and can look like the beginning of another format."""
    for length in range(1, 260):
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        path = safetensors(tmp_path / "a.safetensors", {"n" * length: entry})
        assert len(convert(path, tmp_path / "out.pt", dry_run=True).tensors) == 1


@pytest.mark.parametrize(
    ("offsets", "shape"),
    [
        ([0.0, 8.0], [2]),
        ([False, 8], [2]),
        ([0, float("nan")], [2]),
        ([0, 8], [2.0]),
        ([0, 8], [1, -2]),
        ([-8, 0], [2]),
        ([0, 4], [2]),
    ],
)
def test_safetensors_places_are_whole_numbers(
    offsets: list[float], shape: list[float], tmp_path: Path
) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    refusal(safetensors(tmp_path / "a.safetensors", {"a": entry}))


@pytest.mark.parametrize("second", [[0, 4], [2, 6], [5, 9]])
def test_safetensors_neither_overlap_nor_leave_gaps(second: list[int], tmp_path: Path) -> None:
    entries = {
        name: {"dtype": "U8", "shape": [4], "data_offsets": offsets}
        for name, offsets in {"a": [0, 4], "b": second}.items()
    }
    path = safetensors(tmp_path / "a.safetensors", entries, bytes(second[1]))
    assert "bytes of b are not where they should be" in refusal(path)


def test_a_huge_safetensors_header_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little") + b"{")
        file.truncate(300_000_000)  # of which the disk holds nothing
    assert "header would be too large" in refusal(tmp_path / "a.safetensors")


def test_a_name_that_is_no_text_is_refused_for_safetensors(tmp_path: Path) -> None:
    torch.save({"a\ud800": torch.ones(1)}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="safetensors cannot hold this name"):
        convert(tmp_path / "a.ckpt", tmp_path / "out.safetensors")
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_with_two_entries_of_a_name_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "last.ckpt")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(archive.infolist()[-1].filename, b"another")
    assert "not one that torch.save writes" in refusal(path)


def test_a_local_zip_header_that_is_none_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "last.ckpt")
    with zipfile.ZipFile(path) as archive:
        at = next(i.header_offset for i in archive.infolist() if i.filename.endswith("data/0"))
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert "damaged: data/0 cannot be read" in refusal(path)


def test_what_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait for somebody to write into it."""
    os.mkfifo(tmp_path / "pipe.ckpt")
    assert "pipe.ckpt is not a regular file" in refusal(tmp_path / "pipe.ckpt")
