"""A network in several files is converted whole or not at all; what is no checkpoint is named."""

import gzip
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from harness.convert import CheckpointError, convert
from harness.errors import UserError

from .checkpoint_matrix import Net, same, save_distributed, trained
from .test_command import run

NETWORK = trained(Net())
STATE = NETWORK.state_dict()
STEMS = {"safetensors": "model", "bin": "pytorch_model"}


def sharded(folder: Path, kind: str = "safetensors", num_shards: int = 3) -> Path:
    """Save the network as Hugging Face does, and return the index."""
    folder.mkdir(exist_ok=True)
    save: Callable[..., object] = save_file if kind == "safetensors" else torch.save
    places: dict[str, str] = {}
    for i in range(num_shards):
        file = f"{STEMS[kind]}-{i + 1:05}-of-{num_shards:05}.{kind}"
        part = {name: STATE[name] for name in sorted(STATE)[i::num_shards]}
        save(part, folder / file)
        places |= dict.fromkeys(part, file)
    index = folder / f"{STEMS[kind]}.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    (folder / "config.json").write_text("{}")
    return index


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        convert(path, path.parent / "refused.pt", **options)
    assert not (path.parent / "refused.pt").exists()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("source", ["folder", "index", "shard"])
def test_sharded_files_become_the_whole_network(kind: str, source: str, tmp_path: Path) -> None:
    index = sharded(tmp_path / "hf", kind)
    shard = next(index.parent.glob(f"*-00002-of-00003.{kind}"))
    path = {"folder": index.parent, "index": index, "shard": shard}[source]
    report = convert(path, tmp_path / "out.pt")
    assert report.kind == f"3 shards of {index.name}"
    state = torch.load(tmp_path / "out.pt")
    assert all(same(state[name], value) for name, value in STATE.items())
    NETWORK.load_state_dict(state)


def test_all_shards_on_one_line_are_one_network(tmp_path: Path) -> None:
    index = sharded(tmp_path / "hf")
    result = run(*sorted(index.parent.glob("*.safetensors")), folder=tmp_path)
    assert result.stdout.count("wrote") == 1
    NETWORK.load_state_dict(torch.load(index.parent / "model.weights.pt"))
    result = run(*sorted(index.parent.glob("*.safetensors")), "-o", "{stem}.pt", folder=tmp_path)
    NETWORK.load_state_dict(torch.load(tmp_path / "model.pt"))


def test_a_search_takes_a_sharded_folder_as_one(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    sharded(tmp_path / "runs" / "hf")
    torch.save(STATE, tmp_path / "runs" / "a.ckpt")
    for _ in range(2):
        assert run("runs", "--force", folder=tmp_path).stdout.count("wrote") == 2
    NETWORK.load_state_dict(torch.load(tmp_path / "runs" / "hf.weights.pt"))


def test_of_one_network_in_two_formats_one_is_read(tmp_path: Path) -> None:
    sharded(tmp_path / "hf", "bin")
    index = sharded(tmp_path / "hf")
    assert index.name in convert(index.parent, tmp_path / "out.pt").kind
    shutil.copy(index, index.with_name("other.safetensors.index.json"))
    message = refusal(index.parent)
    assert "holds model.safetensors.index.json and other.safetensors.index.json" in message


@pytest.mark.parametrize("with_index", [False, True])
def test_a_shard_alone_is_refused(with_index: bool, tmp_path: Path) -> None:
    index = sharded(tmp_path / "hf")
    (tmp_path / "alone").mkdir()
    shard = tmp_path / "alone" / "model-00001-of-00003.safetensors"
    shutil.copy(index.with_name(shard.name), shard)
    if with_index:
        shutil.copy(index, shard.parent)
        message = "of the 3 shards that model.safetensors.index.json names 2 are missing, the first"
        assert f"{message} is model-00002-of-00003.safetensors" in refusal(shard)
    else:
        assert "(*.index.json) is not beside it" in refusal(shard)
    assert run("alone", folder=tmp_path).returncode == 3


def test_one_file_of_one_is_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00001.safetensors"
    save_file(STATE, path)
    assert len(convert(path, tmp_path / "out.pt").tensors) == len(STATE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda places: places.pop("bn.bias"), "bn.bias is in .*, and by .* it is nowhere"),
        (lambda places: places.update(other=places["bn.bias"]), "other is not in model-0"),
        (
            lambda places: places.update({"bn.bias": places["bn.weight"]}),
            r"bn.bias is in .*, and by .* it is in model-",
        ),
        (lambda places: places.update(a="../a.safetensors"), "names no shards beside it"),
        (lambda places: places.update(a="model.safetensors.index.json"), "names no shards"),
        (lambda places: places.clear(), "names no shards"),
        (lambda places: places.update(a=[1]), "index.json cannot be read"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
    change: Callable[[dict[str, object]], object], message: str, tmp_path: Path
) -> None:
    index = sharded(tmp_path / "hf")
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        convert(index, tmp_path / "out.pt")


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    index = sharded(tmp_path / "hf")
    save_file(STATE, index.with_name("model-00002-of-00003.safetensors"))
    assert "and by model.safetensors.index.json it is in" in refusal(index)


def test_a_shard_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    index = sharded(tmp_path / "hf")
    index.with_name("model-00002-of-00003.safetensors").write_bytes(LFS)
    assert "model-00002-of-00003.safetensors: not a checkpoint: a Git LFS" in refusal(index)


def test_no_shard_is_ever_overwritten(tmp_path: Path) -> None:
    index = sharded(tmp_path / "hf", num_shards=1)
    shard = index.with_name("model-00001-of-00001.safetensors")
    for source in (index, index.parent, shard):
        with pytest.raises(UserError, match="is the source or a part of it"):
            convert(source, shard, force=True)


@pytest.mark.parametrize("name", ["consolidated.00.pth", "mp_rank_00/model.pt"])
def test_a_part_of_a_split_network_is_refused(name: str, tmp_path: Path) -> None:
    first, second = tmp_path / name, tmp_path / name.replace("00", "01")
    for part in (first, second):
        part.parent.mkdir(exist_ok=True)
        torch.save(STATE, part)
    assert "into which a network was split" in refusal(first)
    shutil.rmtree(second.parent) if second.parent != tmp_path else second.unlink()
    assert len(convert(first, tmp_path / "out.pt").tensors) == len(STATE)


def test_a_file_of_a_distributed_checkpoint_names_the_folder(tmp_path: Path) -> None:
    save_distributed({"model": dict(STATE)}, tmp_path / "step 10")
    (file,) = (tmp_path / "step 10").glob("*.distcp")
    assert f"convert its folder, '{file.parent}'" in refusal(file)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n"


def archive_of(what: str) -> bytes:
    file = io.BytesIO()
    if what == "tar":
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("model.pt"))
    elif what == "npz":
        np.savez(file, a=np.ones(3))
    else:
        zipfile.ZipFile(file, "w").close()
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.safetensors", LFS, "a Git LFS pointer"),
        ("a.pt", b"\n<!DOCTYPE html><html>", "a web page"),
        ("a.pt", b'<?xml version="1.0"?><Error>', "a web page"),
        ("a.pt.gz", gzip.compress(b"text", mtime=0), "packed with gzip"),
        ("a.tar", archive_of("tar"), "packed with tar"),
        ("a.zip", archive_of("zip"), "an empty zip"),
        ("a.npz", archive_of("npz"), "written by numpy.savez"),
        ("a.npy", b"\x93NUMPY\1\0v\0", "written by numpy.save"),
        ("a.onnx", b"\x08\x07\x12\x07pytorch\x1a\x052.0.0", "an ONNX model"),
        ("a.pt", b"\x08\x07\x12\x07pytorch\x1a\x052.0.0", "an ONNX model"),
        ("a.h5", b"\x89HDF\r\n\x1a\n", "HDF5"),
        ("a.gguf", b"GGUF\3\0\0\0", "GGUF"),
        ("a.tflite", b"\x1c\0\0\0TFL3\x14\0", "TensorFlow"),
        ("config.json", b'{"a": 1}', "a JSON file"),
        ("a.csv", b"epoch,loss\n", "a text file"),
        ("a.safetensors", (9999).to_bytes(8, "little") + b'{"a":{"dty', "ends inside its header"),
        ("a.bin", bytes(range(1, 99)), "neither torch.save's format nor safetensors"),
    ],
)
def test_what_is_no_checkpoint_is_named(
    name: str, content: bytes, what: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert "not a checkpoint: " in message
    assert what in message
