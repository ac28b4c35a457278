"""Attributes of modules, callbacks and data modules cost no more than a fixed budget."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.checkpoints import digests
from harness.checkpoints.digests import SAMPLED, WHOLE, digest
from harness.checkpoints.packing import MAX_KEPT, Packer
from harness.kinds import MOST_SUMMED, corner
from harness.parity.snapshot import MOST_ELEMENTS, Snapshot

MANY = 300_000


def mapped(folder: Path) -> Any:
    """64 GiB of zeros in a sparse file: more than this machine has memory for."""
    shape = (2**24, 1024)
    return np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, shape)  # type: ignore[no-untyped-call]


def test_a_mapped_file_larger_than_memory_is_not_read(tmp_path: Path) -> None:
    array = mapped(tmp_path)
    before = digest({"x": array, "of": [array[1:]]}, {})
    assert digest(array, {}) != digest(array[1:], {})
    assert before[1]  # it holds an array
    packer = Packer(named={})
    assert packer.pack_attribute(array, ("data", "x")) is None
    assert [place for place, _ in packer.objects] == [("data", "x")]


LARGE: dict[str, Any] = {
    "list": lambda: [f"images/{i:08}.png" for i in range(MANY)],
    "dict": lambda: {f"images/{i:08}.png": i for i in range(MANY)},
    "deque": lambda: deque(range(MANY), maxlen=MANY),
    "object": lambda: Index(),
    "text": lambda: ["é" * 2**22],
    "tensor": lambda: torch.zeros(2**23),
}
CHANGES: dict[str, Any] = {
    "list": lambda value: value.append("a"),
    "dict": lambda value: value.update(a=1),
    "deque": lambda value: value.append(1),
    "object": lambda value: value.paths.pop(),
    "text": lambda value: value.append("a"),
    "tensor": lambda value: value[7].fill_(1),
}


class Index:
    def __init__(self) -> None:
        self.paths = [f"images/{i:08}.png" for i in range(MANY)]


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_value_is_compared_by_its_size_and_a_sample(kind: str) -> None:
    value = LARGE[kind]()
    before = digest(value, {})
    assert len(repr(before)) < 20_000
    assert digest(value, {}) == before
    CHANGES[kind](value)
    assert digest(value, {}) != before


class Reports:
    """An object that says how much it holds, as frames and tables do, and notes its pickles."""

    num_pickled = 0

    def __reduce_ex__(self, _: Any) -> Any:
        Reports.num_pickled += 1
        return str, ("",)


class Table(Reports):
    nbytes = 2**30


class Frame(Reports):
    def estimated_size(self) -> int:
        return 2**30


class Slots:
    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows = [0.0] * 50_000


# Modules and callbacks keep these, and change them in the middle, as replay buffers and banks.
BANKS: dict[str, Any] = {
    "array": (lambda: np.zeros(250_000), lambda a: a.__setitem__(170_001, 1)),
    "transposed array": (lambda: np.zeros((4, 80_000)).T, lambda a: a.__setitem__((5_000, 1), 1)),
    "large array": (lambda: np.zeros(2**22), lambda a: a.__setitem__(-1_001, 1)),
    "dict": (lambda: dict.fromkeys(range(120_000), 0.0), lambda d: d.update({60_000: 1.0})),
    "list": (lambda: [0.0] * 200_000, lambda x: x.__setitem__(101_001, 1.0)),
    "lists": (lambda: [[0] * 50 for _ in range(5_000)], lambda x: x[2_345].append(1)),
    "deque": (lambda: deque([0] * 200_000), lambda x: x.__setitem__(99_999, 1)),
    "numbers of NumPy": (
        lambda: dict.fromkeys(range(5_000), np.float32(0)),
        lambda d: d.update({2_500: np.float32(1)}),
    ),
    "tensors": (lambda: [torch.zeros(2) for _ in range(5_000)], lambda x: x[2_500].data.add_(1)),
    "bytes": (lambda: bytearray(10**6), lambda x: x.__setitem__(500_001, 1)),
    "slots": (Slots, lambda x: x.rows.__setitem__(25_000, 1.0)),
    "written tensor": (lambda: torch.zeros(2**20), lambda x: x.data[7].fill_(1)),
}


@pytest.mark.parametrize("kind", BANKS)
def test_every_change_of_a_module_s_value_is_seen_within_the_budget(kind: str) -> None:
    make, change = BANKS[kind]
    value = make()
    before = digest(value, {}, WHOLE)
    assert before.is_complete
    assert digest(value, {}, WHOLE) == before
    change(value)
    assert digest(value, {}, WHOLE) != before


def test_of_a_value_beyond_the_budget_a_digest_says_so() -> None:
    """But not of a tensor, whose writes torch counts, nor of a file that is mapped."""
    array = np.zeros(2**24)
    for value in (array, {"bank": array}, [Reports() for _ in range(60_000)]):
        assert not digest(value, {}, WHOLE).is_complete
    assert digest(torch.zeros(2**25), {}, WHOLE).is_complete
    array.flags.writeable = False
    assert digest(array, {}, WHOLE).is_complete


def test_a_large_tensor_that_takes_the_place_of_another_is_another() -> None:
    """Both may have the same address and the same number of writes."""
    value, seen = torch.zeros(2**24 + 1), set()
    for _ in range(20):
        value = 0.9 * value + 1
        seen.add(digest(value, {}, WHOLE))
    assert len(seen) == 20
    before = len(digests._identities)
    del value
    assert len(digests._identities) < before  # nothing is kept of an object that is freed


def test_a_long_text_is_compared_by_its_identity_and_length() -> None:
    text = "a" * 2**22
    assert len(repr(digest(text, {}))) < 1000
    assert digest(text, {}) == digest(text, {}) != digest(text + "a", {})


def test_of_many_small_objects_a_fixed_number_is_read(monkeypatch) -> None:
    Reports.num_pickled = 0
    value = [Reports() for _ in range(10 * int(SAMPLED.num_objects))]
    before = digest(value, {})
    assert 0 < Reports.num_pickled <= SAMPLED.num_objects
    value.append(value[0])
    assert digest(value, {}) != before
    sizes: list[int] = []
    real = digests.zlib.crc32
    monkeypatch.setattr(digests.zlib, "crc32", lambda x: sizes.append(x.nbytes) or real(x))
    rows = [torch.zeros(2**18) for _ in range(100)]  # 100 MiB
    before = digest(rows, {})
    assert 0 < sum(sizes) <= SAMPLED.num_bytes
    rows[-1][0] = 1
    assert digest(rows, {}) != before


def test_an_object_that_says_how_much_it_holds_is_not_pickled() -> None:
    """A frame of polars makes a copy of all of its columns."""
    Reports.num_pickled = 0
    frame = Frame()
    assert digest({"x": [Table(), frame]}, {})
    assert digest(frame, {}) == digest(frame, {})
    assert digest(frame, {}) != digest(Frame(), {})
    assert Reports.num_pickled == 0


class Unsized:
    def __len__(self) -> int:
        raise TypeError("a stream has no length")


@pytest.mark.parametrize(
    "of", [lambda: torch.tensor(1.0), Unsized, lambda: [[["a"] * 64] * 64] * 64]
)
def test_what_a_large_list_holds_may_have_no_length_or_many_levels(of: Any) -> None:
    value = [of() for _ in range(30_000)]
    before = digest(value, {})
    assert len(repr(before)) < 300_000  # of 10 MB
    value.pop()
    assert digest(value, {}) != before


def test_a_checkpoint_keeps_what_is_not_larger_than_its_budget() -> None:
    packer = Packer(named={})
    fits = [torch.ones(MAX_KEPT // 8), {"a": [1] * 1000}]
    node = packer.pack_attribute(fits, ("callback", "fits"))
    assert torch.equal(node[0], fits[0])
    assert packer.objects == []
    assert packer.pack_attribute([fits[0]] * 2, ("callback", "shared")) is not None
    assert packer.pack_attribute([fits[0].clone() for _ in range(3)], ("callback", "much")) is None
    assert packer.objects == [(("callback", "much"), "larger than 64 MiB")]
    assert packer.pack_attribute([0] * (MAX_KEPT // 128), ("callback", "long")) is None


class Counted(list[int]):
    """A list that counts how many of its elements are read."""

    num_read = 0

    def __iter__(self) -> Any:
        for element in super().__iter__():
            Counted.num_read += 1
            yield element


def test_the_parity_check_copies_nothing_large_of_a_data_module_or_a_callback() -> None:
    holder: Any = SimpleNamespace(paths=Counted(range(10**6)))
    Snapshot(data=holder)
    assert 0 < Counted.num_read <= MOST_ELEMENTS + 1
    table = torch.ones(64, 2**18)  # 64 MiB, of which a sum in double precision would copy 128
    assert corner(table).numel() <= MOST_SUMMED
    assert corner(table).data_ptr() == table.data_ptr()
    before = Snapshot(SimpleNamespace(table=table)).fingerprint()
    table[0, 0] = 2
    assert Snapshot(SimpleNamespace(table=table)).fingerprint() != before
