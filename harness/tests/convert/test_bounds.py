"""No file of 10 MB takes more than 5 s of computing or 300 MB, measured in a process of its own."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.convert import convert

from .hostile import Converter, too_much
from .hostile_files import FILES


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Converter]:
    process = Converter(tmp_path_factory.mktemp("converter"))
    yield process
    process.close()


# One for each thing that is charged: opcodes, calls, names, views, JSON, shards, zip entries.
QUICK = (
    *(
        "empty_lists",
        "padded_lists",
        "padded_lists_beside",
        "instances_beside",
        "long_deque",
        "one_tensor",
        "views_0",
        "expanded",
    ),
    *("json_tensors", "shared_chunks", "overlapping_entries", "long_prefix"),
)


@pytest.mark.parametrize(
    ("names", "size"), [(QUICK, 3_000_000), pytest.param([*FILES], 10**7, marks=pytest.mark.slow)]
)
def test_a_hostile_file_is_read_or_refused_in_bounds(
    names: list[str], size: int, converter: Converter, tmp_path: Path
) -> None:
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        path = FILES[name](folder, size, random.Random(name))
        is_view = name.startswith(("views", "expanded"))
        for suffix in (".pt", ".safetensors")[: 1 + is_view]:
            cost = converter.convert(path, suffix)
            assert not cost.forbidden, name
            assert not cost.result.startswith("TRACEBACK"), (name, cost.result)
            assert "\n" not in cost.result, name
            assert not too_much(cost, size), (name, cost)


def test_long_values_are_passed_over(tmp_path: Path) -> None:
    """What is beside the weights may be large, and is not read."""
    state = {"state_dict": {"a": torch.ones(2)}, "notes": "x" * 200_000, 7: b"y" * 200_000}
    torch.save(state, tmp_path / "in.ckpt")
    convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt").keys() == {"a"}


def test_many_honest_names_are_not_refused(tmp_path: Path) -> None:
    """Scalars with short names and an average beside them: each has the fewest bytes."""
    state = {f"{i:x}": torch.tensor(float(i)) for i in range(20_000)}
    torch.save({"state_dict": state, "state_dict_ema": state}, tmp_path / "in.ckpt")
    report = convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    assert len(report.tensors) == 20_000
