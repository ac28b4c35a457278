import io
import itertools
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from harness.convert import CheckpointError, convert
from harness.convert.read import Checkpoint
from harness.convert.stream import BLOCK, stream

from .checkpoint_matrix import same

State = dict[str, torch.Tensor]


def converted(state: State, folder: Path, suffix: str = ".pt", **options: object) -> State:
    torch.save(state, folder / "in.ckpt")
    convert(folder / "in.ckpt", folder / f"out{suffix}", force=True, **options)
    if suffix == ".safetensors":
        return load_file(folder / "out.safetensors")
    return torch.load(folder / "out.pt")


def test_of_a_view_only_the_slice_is_written(tmp_path: Path) -> None:
    storage = torch.arange(1_000_000.0)
    views = {"a": storage[7:17], "b": storage[999_000:], "c": storage[::100_000]}
    state = converted(views, tmp_path)
    assert (tmp_path / "out.pt").stat().st_size < 10_000
    assert all(same(state[name], view) for name, view in views.items())


def test_tied_weights_share_memory_again(tmp_path: Path) -> None:
    weight = torch.rand(100, 100)
    state = {"a": weight, "b": weight, "rows": weight[10:20], "t": weight.t(), "c": weight.clone()}
    loaded = converted(state, tmp_path)
    pointers = {name: tensor.untyped_storage().data_ptr() for name, tensor in loaded.items()}
    assert pointers["a"] == pointers["b"] == pointers["rows"] == pointers["t"] != pointers["c"]
    assert (tmp_path / "out.pt").stat().st_size < 2 * weight.nbytes + 2_000
    assert all(same(loaded[name], tensor) for name, tensor in state.items())


def test_tied_strided_weights_are_written_once(tmp_path: Path) -> None:
    column = torch.rand(1000, 50)[:, 3]
    loaded = converted({"a": column, "b": column}, tmp_path)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert (tmp_path / "out.pt").stat().st_size < 2 * column.numel() * 4


def test_safetensors_copies_tied_weights(tmp_path: Path) -> None:
    weight = torch.rand(10, 10)
    loaded = converted({"a": weight, "b": weight}, tmp_path, ".safetensors")
    assert torch.equal(loaded["a"], weight)
    assert torch.equal(loaded["b"], weight)


def test_channels_last_stays_channels_last(tmp_path: Path) -> None:
    weight = torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last)
    loaded = converted({"weight": weight}, tmp_path)["weight"]
    assert loaded.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, 5],
        lambda x: x[::2, ::3],
        lambda x: x[0].expand(700, 1300),
        lambda x: x[3:4, 3:4].expand(900, 800),
        lambda x: x.reshape(-1)[:3_603_600].reshape(7, 11, 13, 3600).permute(3, 1, 0, 2),
        lambda x: x.t()[5:900, 3:1000:7],
        lambda x: x[:0].t(),
        lambda x: x[2, 2],
    ],
)
def test_any_strides_give_the_same_bits(make: object, suffix: str, tmp_path: Path) -> None:
    """Larger than a block, so that blocks are cut and joined."""
    tensor = make(torch.arange(3_900_000).to(torch.float32).reshape(3000, 1300))
    assert same(converted({"x": tensor}, tmp_path, suffix)["x"], tensor)


def test_blocks_stay_small(tmp_path: Path) -> None:
    """A transposed matrix is gathered piece by piece, never at once."""
    torch.save({"x": torch.rand(3000, 3000).t()[:, ::2]}, tmp_path / "in.ckpt")
    with Checkpoint(tmp_path / "in.ckpt") as checkpoint:
        sizes = [len(chunk) for chunk in stream(checkpoint.root["x"], "float32")]
    assert max(sizes) <= BLOCK
    assert sum(sizes) == 3000 * 1500 * 4


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("sparse", lambda: torch.eye(3).to_sparse()),
        ("compressed", lambda: torch.eye(3).to_sparse_csr()),
        ("quantized", lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8)),
        ("meta", lambda: torch.empty(3, device="meta")),
        ("lazy", lambda: nn.LazyLinear(3).weight),
    ],
)
def test_what_is_not_a_dense_tensor_is_refused_by_name(
    name: str, tensor: object, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about sparse and quantized tensors
        torch.save({"a": torch.ones(2), name: tensor()}, tmp_path / "in.ckpt")
    with pytest.raises(CheckpointError, match=f"in.ckpt: {name} is not a dense tensor"):
        convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    assert sorted(os.listdir(tmp_path)) == ["in.ckpt"]


def test_what_is_not_a_tensor_is_dropped_aloud(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b._extra_state": {"x": 1}}, tmp_path / "in.ckpt")
    report = convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    assert report.dropped == ["b._extra_state (not a tensor)"]


def test_complex128_has_no_place_in_safetensors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="safetensors cannot hold complex128"):
        converted({"x": torch.ones(2, dtype=torch.complex128)}, tmp_path, ".safetensors")


ALL_HALF = torch.arange(-(2**15), 2**15).to(torch.int16)
FLOATS = {
    "float16": ALL_HALF.view(torch.float16),
    "bfloat16": ALL_HALF.view(torch.bfloat16),
    "float32": torch.cat([torch.randn(9999), torch.tensor([0.0, -0.0, 1e-40, 3.1e-5, -6e-8])]),
    "float64": torch.cat([torch.randn(9999).double(), torch.tensor([1e-300, 65519.9]).double()]),
}


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_conversion_of_types_equals_torchs(source: str, target: str, tmp_path: Path) -> None:
    """All values of the small types, a sample of the large ones."""
    wanted = getattr(torch, target)
    values = FLOATS[source]
    finite_after = ~(values.to(wanted).isinf() & ~values.float().isinf())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    values = values.view(bits)[finite_after].view(values.dtype)
    loaded = converted({"x": values, "n": torch.arange(3)}, tmp_path, dtype=target)
    expected = values.to(wanted)
    assert loaded["x"].dtype == wanted
    assert loaded["n"].dtype == torch.int64
    number = ~expected.isnan()
    assert same(loaded["x"][number], expected[number])
    assert loaded["x"][~number].isnan().all()


@pytest.mark.parametrize(
    ("value", "target"), [(1e39, "float32"), (65520.0, "float16"), (3.4e38, "bfloat16")]
)
def test_an_overflow_is_an_error_that_names_the_tensor(
    value: float, target: str, tmp_path: Path
) -> None:
    state = {"ok": torch.ones(3), "large": torch.tensor([1.0, value], dtype=torch.float64)}
    with pytest.raises(CheckpointError, match=f"large: a value is too large for {target}"):
        converted(state, tmp_path, dtype=target)
    assert not (tmp_path / "out.pt").exists()


def test_eight_bit_floats_stay_what_they_are(tmp_path: Path) -> None:
    """Their scale is elsewhere, so that their numbers alone are not the weights."""
    state = {"x": torch.ones(3).to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match="float8_e4m3fn cannot become float32; use --dtype"):
        converted(state, tmp_path, dtype="float32")
    assert same(converted(state, tmp_path)["x"], state["x"])


def test_infinite_values_may_stay_infinite(tmp_path: Path) -> None:
    values = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert converted({"x": values}, tmp_path, dtype="float16")["x"][:2].isinf().all()


def test_converted_tied_weights_still_share_memory(tmp_path: Path) -> None:
    weight = torch.rand(10, 10)
    loaded = converted({"a": weight, "b": weight.t()}, tmp_path, dtype="bfloat16")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert torch.equal(loaded["b"], weight.bfloat16().t())


def test_memory_mapped_loading_gives_aligned_tensors(tmp_path: Path) -> None:
    state = {str(i): torch.rand(i) for i in range(1, 50)}
    converted(state, tmp_path)
    mapped = torch.load(tmp_path / "out.pt", mmap=True)
    assert all(same(mapped[name], tensor) for name, tensor in state.items())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in mapped.values())


def test_a_batch_norm_keeps_its_version(tmp_path: Path) -> None:
    network = nn.Sequential(nn.BatchNorm1d(3))
    loaded = converted(network.state_dict(), tmp_path)
    assert loaded._metadata["0"]["version"] == 2


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_shards_are_joined(split: tuple[int, int], suffix: str, tmp_path: Path) -> None:
    """A checkpoint of several ranks, cut along rows, columns or both, unevenly."""
    tensor = torch.arange(7 * 11, dtype=torch.int32).reshape(7, 11)
    rows, columns = (np.array_split(np.arange(n), k) for n, k in zip((7, 11), split, strict=True))
    boxes = [(r[0], c[0], len(r), len(c)) for r, c in itertools.product(rows, columns)]
    save_shards(tmp_path / "dcp", "x", tensor, boxes)
    convert(tmp_path / "dcp", tmp_path / f"out{suffix}")
    load = torch.load if suffix == ".pt" else load_file
    assert same(load(tmp_path / f"out{suffix}")["x"], tensor)


def save_shards(
    folder: Path, name: str, tensor: torch.Tensor, boxes: list[tuple[int, int, int, int]]
) -> None:
    """Write what ranks that hold a box each (row, column, height, width) would write."""
    folder.mkdir()
    chunks, places = [], {}
    for rank, (row, column, height, width) in enumerate(boxes):
        offsets, sizes = torch.Size([int(row), int(column)]), torch.Size([height, width])
        chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
        file = io.BytesIO()
        box = torch.zeros(height, width, dtype=tensor.dtype)
        part = tensor[row : row + height, column : column + width]
        box[: part.shape[0]] = part
        torch.save(box, file)
        content = b"other shards" * rank + file.getvalue() + b"and more"
        (folder / f"__{rank}_0.distcp").write_bytes(content)
        place = _StorageInfo(f"__{rank}_0.distcp", 12 * rank, len(file.getvalue()))
        places[metadata.MetadataIndex(name, offsets)] = place
    properties = metadata.TensorProperties(dtype=tensor.dtype)
    entry = metadata.TensorStorageMetadata(properties, tensor.shape, chunks)
    content = metadata.Metadata({name: entry}, {name: (name,)}, places)
    (folder / ".metadata").write_bytes(pickle.dumps(content))


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [
        ([(0, 3), (3, 4)], True),
        ([(3, 4), (0, 3), (7, 0)], True),
        ([(0, 3), (3, 3)], False),
        ([(0, 4), (3, 3)], False),
        ([(0, 3), (4, 4)], False),
        ([(0, 7), (0, 7)], False),
    ],
)
def test_shards_must_tile_the_tensor(
    rows: list[tuple[int, int]], tiles: bool, tmp_path: Path
) -> None:
    """Otherwise part of the result would be whatever was in memory."""
    tensor = torch.arange(77.0).reshape(7, 11)
    boxes = [(row, 0, num_rows, 11) for row, num_rows in rows]
    save_shards(tmp_path / "dcp", "x", tensor, boxes)
    if tiles:
        convert(tmp_path / "dcp", tmp_path / "out.pt")
        assert same(torch.load(tmp_path / "out.pt")["x"], tensor)
    else:
        with pytest.raises(CheckpointError, match=r"do not make up the tensor|overlap"):
            convert(tmp_path / "dcp", tmp_path / "out.pt")


def test_an_empty_sharded_tensor_stays_empty(tmp_path: Path) -> None:
    save_shards(tmp_path / "dcp", "x", torch.empty(0, 11), [])
    convert(tmp_path / "dcp", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["x"].shape == (0, 11)


RANK = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
sync = "file://" + sys.argv[1] + ".sync"
dist.init_process_group("gloo", init_method=sync, rank=int(sys.argv[2]), world_size=2)
mesh = init_device_mesh("cpu", (2,))
full = torch.arange(35, dtype=torch.float32).reshape(7, 5)
placements = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
state = {name: distribute_tensor(full, mesh, [p]) for name, p in placements.items()}
dcp.save({"model": state, "optimizer_0": {"state": dict(state)}}, checkpoint_id=sys.argv[1])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_two_ranks_saved_is_joined(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    command = [sys.executable, "-c", RANK, str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    convert(folder, tmp_path / "out.pt")
    full = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    state = torch.load(tmp_path / "out.pt")
    assert state.keys() == {"rows", "columns", "whole"}
    assert all(same(tensor, full) for tensor in state.values())


def test_equal_views_of_which_one_is_negated_do_not_share(tmp_path: Path) -> None:
    view = torch.randn(9, dtype=torch.complex64)[::2]
    state = {"plain": view, "conj": view.conj(), "again": view.conj()}
    loaded = converted(state, tmp_path)
    assert all(same(loaded[name], value.resolve_conj()) for name, value in state.items())
    assert loaded["conj"].data_ptr() == loaded["again"].data_ptr()
