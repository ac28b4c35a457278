"""Nothing in a file is executed, and no file of 10 MB takes more than 5 s of computing or 300 MB.

Each is converted in a process of its own, under Python's audit hooks and limits.
"""

import os
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from harness.convert import convert
from tests.conftest import slow

from .hostile import Converter, Cost
from .hostile_files import FILES, name_of, push, zipped


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Converter]:
    process = Converter(tmp_path_factory.mktemp("converter"))
    yield process
    process.close()


def assert_harmless(cost: Cost, name: object) -> None:
    """No code of the file has run, and it was read, or refused with a message."""
    assert not cost.forbidden, (name, cost)
    assert not cost.result.startswith("TRACEBACK"), (name, cost)
    assert "\n" not in cost.result, (name, cost)


# Operations that are charged or refused; all are slow. A smaller size than 3 MB explains less.
QUICK = "padded_lists long_memo huge_bytes hash_bomb name_bomb one_tensor endless_tower expanded"
QUICK += " json_tensors overlapping_entries"


@pytest.mark.ci
@pytest.mark.parametrize(("names", "size"), [(QUICK.split(), 3_000_000), *slow(([*FILES], 10**7))])
def test_a_hostile_file_is_read_or_refused_in_bounds(
    names: list[str], size: int, converter: Converter, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        path = FILES[name](tmp_path / name, size)
        is_view = name.startswith(("views", "expanded"))
        for suffix in (".pt", ".safetensors")[: 1 + is_view]:
            cost = converter.convert(path, suffix)
            assert_harmless(cost, name)
            assert cost.cpu_seconds <= 1 + 0.4e-6 * size, (name, cost)
            assert cost.mib <= 60 + 24e-6 * size, (name, cost)


@pytest.mark.ci
def test_many_honest_names_are_not_refused(tmp_path: Path) -> None:
    """Scalars with short names and an average beside them: each has the fewest bytes."""
    state = {f"{i:x}": torch.tensor(float(i)) for i in range(20_000)}
    torch.save({"state_dict": state, "state_dict_ema": state}, tmp_path / "in.ckpt")
    assert len(convert(tmp_path / "in.ckpt", dry_run=True).tensors) == 20_000


class Evil:
    """Writes a file when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.mark}",)


def calls(mark: Path) -> dict[str, bytes]:
    """Pickles that call through each opcode that can call."""
    system, argument = name_of("os.system"), push(f"touch {mark}")
    pickles = {
        "reduce": system + argument + b"\x85R",
        "inst": b"(" + argument + b"ios\nsystem\n",
        "obj": b"(" + system + argument + b"o",
        "newobj": system + argument + b"\x85\x81",
        "stack_global": push("os", "system") + b"\x93" + argument + b"\x85R",
        "build_setstate": system + b")R}" + push("__setstate__") + system + b"sb",
        "extension": b"\x82\x01",
        "persistent": system + argument + b"\x85RQ",
    }
    return {name: b"\x80\x04" + opcodes + b"." for name, opcodes in pickles.items()}


def test_no_opcode_executes(converter: Converter, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    for name, data in calls(mark).items():
        assert_harmless(converter.convert(zipped(tmp_path / name, data)), name)
    for protocol in (2, 4):
        state = {"state_dict": {"a": torch.ones(2)}, "hyper_parameters": Evil(mark)}
        torch.save(state, tmp_path / "evil.ckpt", pickle_protocol=protocol)
        assert converter.convert(tmp_path / "evil.ckpt")[:2] == ("converted", [])
    assert not mark.exists()


def test_the_hook_would_notice(tmp_path: Path) -> None:
    """The test of the tests: torch's own unsafe load is seen, and executes."""
    mark = tmp_path / "executed"
    torch.save(Evil(mark), tmp_path / "evil.ckpt")
    process = Converter(tmp_path, "unsafe")
    events = [event for event, _ in process.convert(tmp_path / "evil.ckpt").forbidden]
    process.close()
    assert "os.system" in events
    assert mark.exists()


# These are put into a file: opcodes that call and name, and whole names.
OPCODES = [bytes([code]) for code in b"Rioc\x81\x92\x93bsuae]})(0tQ\x85\x86\x87\x94hjpq\x8e\x96.2"]
PIECES = [*OPCODES, b"", b"cos\nsystem\n", b"cbuiltins\neval\n", b"\x85R"]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change, insert, remove or repeat a few bytes."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(content))
        piece = rng.choice([rng.choice(PIECES), bytes(content[max(0, at - 20) : at])])
        content[at : at + rng.choice([0, 1, 1, 8])] = piece
    return bytes(content)


@pytest.mark.parametrize("num", [100, *slow(5_000)])
def test_mutated_checkpoints_neither_execute_nor_crash(
    num: int, converter: Converter, tmp_path: Path
) -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = {"state_dict": network.state_dict(), "hyper_parameters": {"net": network}}
    torch.save(state, tmp_path / "zip.ckpt")
    save_file(network.state_dict(), tmp_path / "a.safetensors")
    contents = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    with zipfile.ZipFile(tmp_path / "zip.ckpt") as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    rng, target = random.Random(num), tmp_path / "mutated"
    for i in range(num):
        if i % 3 == 0:
            target.write_bytes(mutate(rng.choice(contents), rng))
        else:  # its pickle alone, under a checksum that fits
            with zipfile.ZipFile(target, "w") as new:
                for name, data in entries.items():
                    is_pickle = name.endswith("data.pkl")
                    new.writestr(name, mutate(data, rng) if is_pickle else data)
        assert_harmless(converter.convert(target), i)
