"""Inputs are split by sample and outputs joined by sample, or the call is refused."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple

import torch

from harness.strategies.splitting import join, share_sizes, split

CPU, META = torch.device("cpu"), torch.device("meta")
TWO = [CPU, CPU]
Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Record:
    image: torch.Tensor
    name: str


def test_samples_are_dealt_as_torch_chunk_deals_them():
    assert share_sizes(30, 2) == [15, 15]
    assert share_sizes(9, 8) == [2, 2, 2, 2, 1]
    assert share_sizes(0, 2) == []
    for num_samples in range(1, 33):
        for num_devices in range(1, 9):
            chunks = torch.arange(num_samples).chunk(num_devices)
            assert share_sizes(num_samples, num_devices) == [len(chunk) for chunk in chunks]


def test_only_the_first_device_sees_the_callers_memory():
    x, scale = torch.zeros(4), torch.zeros(1)
    first, second = split((x, scale), {}, TWO)
    for tensor in second.args:
        tensor += 1
    first.args[0].add_(2)
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
    _, second = split((nest,), {}, TWO)
    half = second.args[0]
    assert torch.equal(half["pair"].right[0], x[2:])
    assert torch.equal(half["record"].image, x[2:])
    assert half["record"].name == "kept"
    assert isinstance(half["ordered"], OrderedDict)
    assert half["default"]["new"] == []
    assert half["rest"] == nest["rest"]


def test_scalars_and_single_rows_go_to_every_device():
    x, scalar, row = torch.arange(4), torch.tensor(3), torch.ones(1, 4)
    numbers = ([7, 8], (1, 2, 3, 4), [[0.5]])  # not one per sample
    for share in split((row, scalar, x, *numbers), {}, TWO):
        assert torch.equal(share.args[0], row)
        assert share.args[1] == 3
        assert len(share.args[2]) == 2
        assert share.args[3:] == numbers


def test_joined_outputs_are_in_the_order_of_the_samples():
    parts = [{"a": Pair(torch.arange(3), "name")}, {"a": Pair(torch.arange(3, 5), "name")}]
    joined = join(parts, [3, 2])
    assert torch.equal(joined["a"].left, torch.arange(5))
    assert joined["a"].right == "name"


def test_what_was_moved_to_the_cpu_stays_there():
    """The lengths that `pack_padded_sequence` takes; what forward returns of them as well."""
    x, lengths = torch.ones(4, 3, device=META), torch.arange(4)
    for share in split((x, lengths), {}, [META, META]):
        assert [argument.device for argument in share.args] == [META, CPU]
    assert join([torch.ones(2), torch.ones(2)], [2, 2]).device == CPU
    assert join([x[:2], x[2:]], [2, 2]).device == META
