"""Nothing in a file is executed, and no file of 10 MB takes more than 5 s of computing or 300 MB.

Each is converted in a process of its own, under Python's audit hooks and limits.
"""

import os
import pickle
import random
import struct
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from harness.convert import convert

from .hostile import SERVER, Converter, too_much
from .hostile_files import FILES, zipped


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Converter]:
    process = Converter(tmp_path_factory.mktemp("converter"))
    yield process
    process.close()


# One for each thing that is charged: opcodes, calls, names, views, JSON, shards, zip entries.
QUICK = "empty_lists padded_lists_beside instances_beside long_deque one_tensor views_0 expanded"
QUICK += " json_tensors overlapping_entries long_prefix averages"


@pytest.mark.parametrize(
    ("names", "size"),
    [(QUICK.split(), 3_000_000), pytest.param([*FILES], 10**7, marks=pytest.mark.slow)],
)
def test_a_hostile_file_is_read_or_refused_in_bounds(
    names: list[str], size: int, converter: Converter, tmp_path: Path
) -> None:
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        path = FILES[name](folder, size)
        is_view = name.startswith(("views", "expanded"))
        for suffix in (".pt", ".safetensors")[: 1 + is_view]:
            cost = converter.convert(path, suffix)
            assert not cost.forbidden, name
            assert not cost.result.startswith("TRACEBACK"), (name, cost.result)
            assert "\n" not in cost.result, name
            assert not too_much(cost, size), (name, cost)


def test_many_honest_names_are_not_refused(tmp_path: Path) -> None:
    """Scalars with short names and an average beside them: each has the fewest bytes."""
    state = {f"{i:x}": torch.tensor(float(i)) for i in range(20_000)}
    torch.save({"state_dict": state, "state_dict_ema": state}, tmp_path / "in.ckpt")
    report = convert(tmp_path / "in.ckpt", tmp_path / "out.pt")
    assert len(report.tensors) == 20_000


class Evil:
    """Writes a file when unpickled."""

    def __init__(self, mark: Path, how: str = "system") -> None:
        self.mark, self.how = str(mark), how

    def __reduce__(self) -> tuple[object, ...]:
        return {
            "system": (os.system, (f"touch {self.mark}",)),
            "eval": (eval, (f"open({self.mark!r}, 'w')",)),
            "popen": (subprocess.Popen, (["touch", self.mark],)),
            "getattr": (getattr, (Path(self.mark), "touch")),
        }[self.how]


HOWS = ["system", "eval", "popen", "getattr"]


def opcodes(mark: Path) -> dict[str, bytes]:
    """Pickles that call through each opcode that can call, or allocate what they have not."""
    text = f"touch {mark}".encode()
    name = b"cos\nsystem\n"
    string = b"X" + struct.pack("<I", len(text)) + text
    short = b"\x8c" + bytes([len(text)]) + text
    return {
        "reduce": b"\x80\x02" + name + string + b"\x85R.",
        "inst": b"\x80\x02(" + string + b"ios\nsystem\n.",
        "obj": b"\x80\x02(" + name + string + b"o.",
        "newobj": b"\x80\x02" + name + string + b"\x85\x81.",
        "stack_global": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + short + b"\x85R.",
        "build_setstate": b"\x80\x02" + name + b")R}X\x0c\x00\x00\x00__setstate__" + name + b"sb.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02" + name + string + b"\x85RQ.",
        # A dict whose key is a tuple of 2 ** 60 numbers, were it ever hashed.
        "hash_bomb": b"\x80\x02}K\x01" + b"2\x86" * 60 + b"K\x02s.",
        # Its text has 2 ** 60 characters.
        "storage_name_bomb": b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nK\x01"
        + b"2\x86" * 60
        + b"X\x03\x00\x00\x00cpuK\x01tQ.",
        "long_memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "huge_bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 50) + b"x.",
        # What a few bytes repeat must not be copied: each of these would take gigabytes.
        "dict_bomb": b"\x80\x02(" + b"NN\x86" * 60_000 + b"lq\x00]("
        b"ccollections\nOrderedDict\nq\x01" + b"h\x01h\x00\x85R" * 20_000 + b"e.",
        "deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    }


def endless_modules() -> dict[str, bytes]:
    """Pickled modules that contain themselves, or each other so often that it comes to that."""
    itself = nn.Module()
    itself.add_module("again", itself)
    tower = nn.Module()
    for _ in range(60):
        floor = nn.Module()
        floor.left = floor.right = tower
        tower = floor
    endless = {"itself": itself, "tower": tower}
    return {name: pickle.dumps(module, 2) for name, module in endless.items()}


def test_no_opcode_executes(converter: Converter, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    pickles = opcodes(mark) | endless_modules()
    pickles |= {how: pickle.dumps({"state_dict": Evil(mark, how)}, 2) for how in HOWS}
    for name, data in pickles.items():
        result, forbidden, _, mib = converter.convert(zipped(tmp_path / name, data))
        assert not forbidden, (name, forbidden)
        assert not result.startswith("TRACEBACK"), (name, result)
        assert "\n" not in result, name
        assert mib < 100, f"{name} takes memory that the file has not"
    for options in ({}, {"pickle_protocol": 4}):
        state = {"state_dict": {"a": torch.ones(2)}, "hyper_parameters": Evil(mark)}
        torch.save(state, tmp_path / "evil.ckpt", **options)
        assert converter.convert(tmp_path / "evil.ckpt")[:2] == ("converted", [])
    assert not mark.exists()


def test_the_hook_would_notice(tmp_path: Path) -> None:
    """The test of the tests: torch's own unsafe load is seen, and executes."""
    mark = tmp_path / "executed"
    torch.save(Evil(mark), tmp_path / "evil.ckpt")
    unsafe = "import torch\ndef convert(path, _): torch.load(path, weights_only=False)\nQUIET ="
    code = SERVER.replace("QUIET =", unsafe, 1).replace("4 << 30", "1 << 40")
    process = Converter(tmp_path, code)
    events = [event for event, _ in process.convert(tmp_path / "evil.ckpt").forbidden]
    process.close()
    assert "os.system" in events
    assert mark.exists()


def seeds(folder: Path) -> list[Path]:
    """Small valid checkpoints of each format, to be mutated."""
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = {"state_dict": network.state_dict(), "hyper_parameters": {"net": network}}
    torch.save(state, folder / "zip.ckpt")
    save_file(network.state_dict(), folder / "st.safetensors")
    return sorted(path for path in folder.iterdir() if path.suffix)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change, insert, remove or repeat a few bytes; favour what calls and names."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(content) + 1)
        kind = rng.random()
        if kind < 0.5 and at < len(content):
            content[at] = rng.choice(b"Rioc\x81\x92\x93bsuae]})(0tQ\x85\x86\x87\x94hjpq\x8e\x96.2")
        elif kind < 0.7:
            content[at:at] = rng.choice(
                [b"cos\nsystem\n", b"cbuiltins\neval\n", b"R", b"\x85R", b"b"]
            )
        elif kind < 0.85:
            del content[at : at + rng.randint(1, 8)]
        else:
            content[at:at] = content[max(0, at - 20) : at]
    return bytes(content)


@pytest.mark.parametrize("num", [100, pytest.param(5_000, marks=pytest.mark.slow)])
def test_mutated_checkpoints_neither_execute_nor_crash(
    num: int, converter: Converter, tmp_path: Path
) -> None:
    rng, originals = random.Random(num), seeds(tmp_path)
    for i in range(num):
        original, target = rng.choice(originals), tmp_path / "mutated"
        if original.suffix == ".ckpt" and rng.random() < 0.7:
            with zipfile.ZipFile(original) as archive, zipfile.ZipFile(target, "w") as new:
                for info in archive.infolist():
                    data = archive.read(info)
                    is_pickle = info.filename.endswith("data.pkl")
                    new.writestr(info.filename, mutate(data, rng) if is_pickle else data)
        else:
            target.write_bytes(mutate(original.read_bytes(), rng))
        result, forbidden, *_ = converter.convert(target)
        assert not forbidden, (i, forbidden)
        assert not result.startswith("TRACEBACK"), (i, result)
        assert "\n" not in result, (i, result)
