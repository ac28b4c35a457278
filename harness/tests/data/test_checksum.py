"""Other data are told of where a run goes on; the same data in another place are not."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from harness.data.checksum import checksum


class Holds(Dataset[Any]):
    """A data set with attributes."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


def tensors(change: float = 0) -> TensorDataset:
    values = torch.arange(30.0).view(10, 3).t()  # not contiguous
    values[1, 7] += change
    return TensorDataset(values, torch.tensor([True, False, True]))


KINDS: dict[str, Callable[[float], Any]] = {
    "tensors": tensors,
    "part of one": lambda change: Subset(tensors(change), [0, 2]),
    "array": lambda change: Holds(rows=np.array([0.5, change])),
    "texts": lambda change: Holds(texts=["a", f"b{change}"]),
}


def test_one_changed_value_is_another_checksum() -> None:
    for kind, make in KINDS.items():
        assert checksum(make(0)) is not None, kind
        assert checksum(make(0)) == checksum(make(0)), kind
        assert checksum(make(0)) != checksum(make(1)), kind


def test_files_count_by_what_they_hold_and_not_by_place_or_time(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("one.bin", "two.bin"):
        (tmp_path / "a" / name).write_bytes(name.encode() * 1000)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    os.utime(tmp_path / "b" / "one.bin", (0, 0))

    def found(folder: str) -> list[int | None]:
        names = [str(tmp_path / folder / name) for name in ("one.bin", "two.bin")]
        listed = [(name, k) for k, name in enumerate(names)]
        return [checksum(one) for one in (Holds(path=names[0]), Holds(samples=listed))]

    before = found("a")
    assert found("b") == before
    changed = tmp_path / "b" / "one.bin"
    changed.write_bytes(changed.read_bytes()[:-1] + b"!")
    assert all(a != b for a, b in zip(before, found("b"), strict=True))


def test_settings_of_a_data_set_are_no_data(tmp_path: Path) -> None:
    assert checksum(Holds(root=str(tmp_path), num_threads=3, lock=object())) is None
