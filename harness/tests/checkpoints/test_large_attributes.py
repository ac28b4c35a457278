"""What a user keeps in a module, a callback or a data module costs no more than a fixed budget."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.checkpoints.digests import digest
from harness.checkpoints.plain import MAX_KEPT, Packer

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
    "tensor": lambda: torch.zeros(2**23),
}
CHANGES: dict[str, Any] = {
    "list": lambda value: value.append("a"),
    "dict": lambda value: value.update(a=1),
    "deque": lambda value: value.append(1),
    "object": lambda value: value.paths.pop(),
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
