"""Tensors of any layout arrive with the same bits, and what cannot is refused by its name."""

import os
import warnings
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch import nn

from harness.convert import CheckpointError, conversion, convert, load
from harness.convert.checkpoint import Checkpoint

from .checkpoint_matrix import State, differing, read_again, same


def converted(state: State, folder: Path, suffix: str = ".pt") -> State:
    torch.save(state, folder / "in.ckpt")
    return read_again(folder / "in.ckpt", suffix)


def test_tied_weights_share_memory_and_of_a_view_only_the_slice_is_written(tmp_path: Path) -> None:
    weight = torch.rand(1000, 100)
    state = {"a": weight, "b": weight, "rows": weight[10:20], "t": weight.t(), "c": weight.clone()}
    loaded = converted(state, tmp_path)
    pointers = {name: tensor.untyped_storage().data_ptr() for name, tensor in loaded.items()}
    assert pointers["a"] == pointers["b"]
    assert len(set(pointers.values())) == 4
    assert differing(loaded, state) == []
    assert all(tensor.is_contiguous() for tensor in loaded.values())
    state = load(tmp_path / "in.ckpt")
    assert state["a"].data_ptr() == state["b"].data_ptr() != state["t"].data_ptr()
    converted({"rows": weight[10:20]}, tmp_path)
    assert (tmp_path / "out.pt").stat().st_size < 10_000


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_any_strides_and_repetitions_give_the_same_bits(suffix: str, tmp_path: Path) -> None:
    """Larger than a block, so that blocks are cut and joined."""
    x = torch.arange(3_900_000).to(torch.float32).reshape(3000, 1300)
    views = {
        "turned": x.t(),
        "gaps": x[::2, ::3],
        "row expanded": x[0].expand(700, 1300),
        "number expanded": x[3:4, 3:4].expand(900, 800),
        "axes": x.reshape(-1)[:3_603_600].reshape(7, 11, 13, 3600).permute(3, 1, 0, 2),
        "part": x.t()[5:900, 3:1000:7],
        "empty": x[:0].t(),
        "number": x[2, 2],
        "gaps expanded": x[:100, :99:3].expand(2, 100, 33),
    }
    if suffix == ".pt":
        views["windows"] = x[0].unfold(0, 7, 2)
    for name, view in views.items():
        assert same(converted({"x": view}, tmp_path, suffix)["x"], view), name


def test_an_expanded_view_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """Half a billion elements, all of them one."""
    torch.save({"a": torch.ones(1).expand(1 << 29)}, tmp_path / "in.ckpt")
    message = r"its weights would take 2\.1 GB, far more than the file"
    for suffix in (".pt", ".safetensors"):
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "in.ckpt", tmp_path / f"out{suffix}")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "in.ckpt")
    assert os.listdir(tmp_path) == ["in.ckpt"]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_flipped_byte_in_any_copy_is_found(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For tensors that are copied, gathered, and shared."""
    matrix = torch.rand(40, 50)
    state = {"all": matrix, "row": matrix[5], "turned": matrix.t(), "again": matrix}
    converted(state, tmp_path, suffix)
    with Checkpoint(tmp_path / f"out{suffix}") as written:
        places = {(t.record.offset, t.record.num_bytes) for t in written.root.values()}
    content = (tmp_path / f"out{suffix}").read_bytes()
    writer = conversion._WRITERS[suffix]
    for position in (offset + at for offset, size in places for at in (0, size - 1)):

        def write(file: BinaryIO, tensors: object, position: int = position) -> dict[str, int]:
            checksums = writer(file, tensors)
            file.flush()
            os.pwrite(file.fileno(), bytes([content[position] ^ 1]), position)
            return checksums

        monkeypatch.setitem(conversion._WRITERS, suffix, write)
        with pytest.raises(CheckpointError, match="does not match its checksum"):
            convert(tmp_path / "in.ckpt", tmp_path / f"out{suffix}", force=True)


def test_what_is_not_a_dense_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about sparse and quantized tensors
        tensors = {
            "sparse": torch.eye(3).to_sparse(),
            "quantized": torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8),
            "meta": torch.empty(3, device="meta"),
            "lazy": nn.LazyLinear(3).weight,
            "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        }
        for name, tensor in tensors.items():
            torch.save({"a": torch.ones(2), name: tensor}, tmp_path / "in.ckpt")
            with pytest.raises(CheckpointError, match=f"in.ckpt: {name} is not a dense tensor"):
                convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
        # A quantized layer keeps its weights in a tuple, and as a module in no tensor at all.
        network = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 4)))
        for root, name in (
            (network.state_dict(), r"0\._packed_params\._packed_params"),
            (network, r"0\._packed_params\._packed_params"),
        ):
            torch.save(root, tmp_path / "in.ckpt")
            with pytest.raises(CheckpointError, match=f"in.ckpt: {name} is not a dense tensor"):
                convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    assert os.listdir(tmp_path) == ["in.ckpt"]
    with pytest.raises(CheckpointError, match="safetensors cannot hold complex128"):
        converted({"x": torch.ones(2, dtype=torch.complex128)}, tmp_path, ".safetensors")


def test_memory_mapped_loading_gives_aligned_tensors(tmp_path: Path) -> None:
    state = {str(i): torch.rand(i) for i in range(1, 50)}
    converted(state, tmp_path)
    mapped = torch.load(tmp_path / "out.pt", mmap=True)
    assert differing(mapped, state) == []
    assert all(tensor.data_ptr() % 64 == 0 for tensor in mapped.values())
