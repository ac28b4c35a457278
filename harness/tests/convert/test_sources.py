"""A network in several files is converted whole or not at all; what is no checkpoint is named."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.convert import CheckpointError, convert
from harness.convert.__main__ import main

from .checkpoint_matrix import Net, same, save_distributed, trained

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


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        convert(path, path.parent / "refused.pt")
    assert not (path.parent / "refused.pt").exists()
    return str(caught.value)


def test_sharded_files_become_the_whole_network(tmp_path: Path) -> None:
    """From the folder, the index or any shard; all shards in one command are one network."""
    for kind in ("safetensors", "bin"):
        index = sharded(tmp_path / kind, kind)
        shard = next(index.parent.glob(f"*-00002-of-00003.{kind}"))
        for path in (index.parent, index, shard):
            report = convert(path, tmp_path / "out.pt", force=True)
            assert report.kind == f"3 shards of {index.name}"
            state = torch.load(tmp_path / "out.pt")
            assert all(same(state[name], value) for name, value in STATE.items())
            NETWORK.load_state_dict(state)
        shards = map(str, sorted(index.parent.glob(f"*.{kind}")))
        assert main([*shards, "-o", f"{tmp_path}/{kind}-{{stem}}.pt"]) == 0
    written = {path.name for path in tmp_path.glob("*.pt")}
    assert written == {"out.pt", "safetensors-model.pt", "bin-pytorch_model.pt"}


def test_a_shard_alone_is_refused(tmp_path: Path) -> None:
    index = sharded(tmp_path / "hf")
    shard = tmp_path / "model-00001-of-00003.safetensors"
    shutil.copy(index.with_name(shard.name), shard)
    assert "(*.index.json) is not beside it" in refusal(shard)
    shutil.copy(index, tmp_path)
    message = "of the 3 shards that model.safetensors.index.json names 2 are missing, the first"
    assert f"{message} is model-00002-of-00003.safetensors" in refusal(shard)


def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path) -> None:
    changes: list[tuple[Callable[[dict[str, object]], object], str]] = [
        (lambda places: places.pop("bn.bias"), "index.json says; they differ by bn.bias"),
        (lambda places: places.update(other=places["bn.bias"]), "they differ by other"),
        (lambda places: places.update({"bn.bias": places["bn.weight"]}), "differ by bn.bias"),
        (lambda places: places.update(a="../a.safetensors"), "names no shards beside it"),
        (lambda places: places.update(a=[1]), "index.json cannot be read"),
    ]
    index = sharded(tmp_path / "hf")
    original = index.read_text()
    for change, message in changes:
        content = json.loads(original)
        change(content["weight_map"])
        index.write_text(json.dumps(content))
        assert message in refusal(index)
    index.write_text(original)
    shard = index.with_name("model-00002-of-00003.safetensors")
    save_file(STATE, shard)
    assert "model-00002-of-00003.safetensors does not hold what" in refusal(index)
    shard.write_bytes(LFS)
    assert f"{shard.name}: not a checkpoint: a Git LFS" in refusal(index)


def test_a_part_of_a_split_network_is_refused(tmp_path: Path) -> None:
    for name in ("consolidated.00.pth", "mp_rank_00/model.pt"):
        first, second = tmp_path / name, tmp_path / name.replace("00", "01")
        for part in (first, second):
            part.parent.mkdir(exist_ok=True)
            torch.save(STATE, part)
        assert "into which the network was split" in refusal(first)
    save_distributed({"model": dict(STATE)}, tmp_path / "step 10")
    (file,) = (tmp_path / "step 10").glob("*.distcp")
    assert "convert its folder" in refusal(file)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n"


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    for content, what in {
        LFS: "a Git LFS pointer",
        b"\n<!DOCTYPE html><html>": "a web page",
        b'<?xml version="1.0"?><Error>': "a web page",
        gzip.compress(b"text", mtime=0): "packed with gzip",
        b"\x89HDF\r\n\x1a\n": "HDF5",
        b"GGUF\3\0\0\0": "GGUF",
        b'{"a": 1}': "a JSON file",
        b"epoch,loss\n": "a text file",
        (9999).to_bytes(8, "little") + b'{"a":{"dty': "ends inside its header",
        bytes(range(1, 99)): "neither torch.save's format nor safetensors",
    }.items():
        (tmp_path / "a.pt").write_bytes(content)
        message = refusal(tmp_path / "a.pt")
        assert "not a checkpoint: " in message
        assert what in message
