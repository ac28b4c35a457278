"""Time and memory are linear in the bytes of a file, with small constants, whatever they say.

CPU time and memory are those of a process of its own; its limits are twice what the docs promise.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.convert import convert

from .hostile import Converter, num_bytes, too_much
from .hostile_files import FILES


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Converter]:
    process = Converter(tmp_path_factory.mktemp("converter"))
    yield process
    process.close()


def check(converter: Converter, path: Path, suffix: str, said: object) -> None:
    """Assert that a file is converted or refused in bounded time, and executes nothing."""
    cost = converter.convert(path, suffix)
    assert not cost.forbidden, said
    assert not cost.result.startswith("TRACEBACK"), (said, cost.result)
    assert "\n" not in cost.result, said
    assert not too_much(cost, 2 * num_bytes(path)), (said, cost)


@pytest.mark.parametrize("size", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_hostile_file_costs_what_its_bytes_explain(
    size: int, converter: Converter, tmp_path: Path
) -> None:
    for name, make in FILES.items():
        folder = tmp_path / name
        folder.mkdir()
        path = make(folder, size, random.Random(name))
        is_view = name.startswith(("views", "expanded"))
        for suffix in (".pt", ".safetensors")[: 1 + is_view]:
            check(converter, path, suffix, name)


def test_long_values_are_passed_over(tmp_path: Path) -> None:
    """What is beside the weights may be large, and is not read."""
    state = {"state_dict": {"a": torch.ones(2)}, "notes": "x" * 200_000, 7: b"y" * 200_000}
    torch.save(state, tmp_path / "in.ckpt")
    convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt").keys() == {"a"}


def test_many_honest_names_are_no_repetition(tmp_path: Path) -> None:
    """Scalars with short names and an average beside them: each has the fewest bytes."""
    state = {f"{i:x}": torch.tensor(float(i)) for i in range(1_000)}
    torch.save({"state_dict": state, "state_dict_ema": state}, tmp_path / "in.ckpt")
    report = convert(tmp_path / "in.ckpt", tmp_path / "out.pt", dry_run=True)
    assert len(report.tensors) == 1_000
