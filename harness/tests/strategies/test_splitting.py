"""Inputs are split by sample and outputs joined by sample, or the call is refused."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple

import torch

from harness.strategies.splitting import join, split

CPU, META = torch.device("cpu"), torch.device("meta")
TWO = [CPU, CPU]
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Record:
    image: torch.Tensor
    name: str


def test_samples_are_dealt_as_torch_chunk_deals_them():
    for num_samples, num_devices, sizes in (
        (30, 2, [15, 15]),
        (9, 8, [2, 2, 2, 2, 1]),
        (2, 4, [1, 1]),
    ):
        x = torch.arange(num_samples)
        shares = split({"x": x}, [CPU] * num_devices, [num_samples])
        assert [size for _, size in shares] == [len(share["x"]) for share, _ in shares] == sizes
        assert torch.equal(torch.cat([share["x"] for share, _ in shares]), x)


def test_only_the_first_device_sees_the_callers_memory():
    x, scale = torch.zeros(4), torch.zeros(1)
    (first, _), (second, _) = split({"x": x, "scale": scale}, TWO, [4])
    for tensor in second.values():
        tensor += 1
    first["x"].add_(2)
    assert x.tolist() == [2, 2, 0, 0]
    assert scale.tolist() == [0]


def test_nested_inputs_keep_their_types():
    x = torch.arange(4)
    nest = {
        "pair": Pair(x, [x]),
        "record": Record(x, "kept"),
        "ordered": OrderedDict(a=x),
        "default": defaultdict(list, a=x),
        "rest": (None, 3, "text", torch.float32, len),
    }
    half = split({"nest": nest}, TWO, [4])[1][0]["nest"]
    assert torch.equal(half["pair"].right[0], x[2:])
    assert torch.equal(half["record"].image, x[2:])
    assert half["record"].name == "kept"
    assert isinstance(half["ordered"], OrderedDict)
    assert half["default"]["new"] == []
    assert half["rest"] == nest["rest"]


def test_scalars_and_single_rows_go_to_every_device():
    x, scalar, row = torch.arange(4), torch.tensor(3), torch.ones(1, 4)
    numbers = ([7, 8], (1, 2, 3), [[0.5]])  # not one per sample
    call = {"row": row, "scalar": scalar, "x": x, "numbers": numbers}
    for share, size in split(call, TWO, [4]):
        assert torch.equal(share["row"], row)
        assert share["scalar"] == 3
        assert len(share["x"]) == size == 2
        assert share["numbers"] == numbers


def test_the_rows_of_a_call_are_those_of_the_batch_or_several_views_of_it():
    for rows, batch_sizes, sizes in (
        ([8], [8], [4, 4]),
        ([24], [8], [12, 12]),  # three views in one tensor
        ([1, 4], [8, 4], [2, 2]),  # of the second loader
        ([1], [8], [1]),  # nothing has rows
        ([0], [8], [1]),
    ):
        call = {str(i): torch.ones(n, 3) for i, n in enumerate(rows)}
        assert [size for _, size in split(call, TWO, batch_sizes)] == sizes


def test_joined_outputs_are_in_the_order_of_the_samples():
    parts = [{"a": Pair(torch.arange(3), "name")}, {"a": Pair(torch.arange(3, 5), "name")}]
    joined = join(parts, [3, 2])
    assert torch.equal(joined["a"].left, torch.arange(5))
    assert joined["a"].right == "name"


def test_what_was_moved_to_the_cpu_stays_there():
    """The lengths that `pack_padded_sequence` takes; what forward returns of them as well."""
    x, lengths = torch.ones(4, 3, device=META), torch.arange(4)
    for share, _ in split({"x": x, "lengths": lengths}, [META, META], [4]):
        assert [argument.device for argument in share.values()] == [META, CPU]
    assert join([torch.ones(2), torch.ones(2)], [2, 2]).device == CPU
    assert join([x[:2], x[2:]], [2, 2]).device == META
