"""Nothing in a checkpoint is executed, whatever it is: checked by Python's audit hooks."""

import io
import os
import pickle
import random
import struct
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from .checkpoint_matrix import save_distributed
from .hostile import SERVER, Converter


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Converter]:
    """A process that converts files under an audit hook."""
    process = Converter(tmp_path_factory.mktemp("audited"))
    yield process
    process.close()


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


def in_zip(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


LEGACY_HEAD = b"".join(
    pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
)


def in_legacy(data: bytes) -> bytes:
    return LEGACY_HEAD + data + pickle.dumps([], 2)


def folder_of(path: Path) -> Path:
    """A distributed checkpoint of one tensor; return its shard."""
    save_distributed({"model": {"weight": torch.ones(3, 2)}}, path)
    (shard,) = path.glob("*.distcp")
    return shard


@pytest.mark.parametrize("container", [in_zip, in_legacy, "metadata", "shard"])
def test_no_opcode_executes(
    audited: Converter, container: str | Callable[[bytes], bytes], tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    pickles = opcodes(mark) | endless_modules()
    pickles |= {how: pickle.dumps({"state_dict": Evil(mark, how)}, 2) for how in HOWS}
    for name, data in pickles.items():
        path = tmp_path / name
        if callable(container):
            path.write_bytes(container(data))
        elif container == "metadata":
            folder_of(path)
            (path / ".metadata").write_bytes(data)
        else:
            folder_of(path).write_bytes(in_zip(data))
        result, forbidden, _, mib = audited.convert(path)
        assert not forbidden, (name, forbidden)
        assert not result.startswith("TRACEBACK"), (name, result)
        assert "\n" not in result, name
        assert mib < 100, f"{name} takes memory that the file has not"
    assert not mark.exists()


def test_evil_hyper_parameters_do_not_stop_the_conversion(
    audited: Converter, tmp_path: Path
) -> None:
    mark = tmp_path / "executed"
    for options in ({"_use_new_zipfile_serialization": False}, {"pickle_protocol": 4}):
        state = {"state_dict": {"a": torch.ones(2)}, "hyper_parameters": Evil(mark)}
        torch.save(state, tmp_path / "evil.ckpt", **options)
        assert audited.convert(tmp_path / "evil.ckpt")[:2] == ("converted", [])
    assert not mark.exists()


def test_a_shard_outside_the_folder_is_refused(audited: Converter, tmp_path: Path) -> None:
    name = folder_of(tmp_path / "dcp").name.encode()
    metadata = (tmp_path / "dcp" / ".metadata").read_bytes()
    assert name in metadata
    other = b"../" + name[:-3]
    (tmp_path / "dcp" / ".metadata").write_bytes(metadata.replace(name, other))
    result, forbidden, *_ = audited.convert(tmp_path / "dcp")
    assert "elsewhere" in result
    assert not forbidden


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
    torch.save(state, folder / "legacy.ckpt", _use_new_zipfile_serialization=False)
    save_file(network.state_dict(), folder / "st.safetensors")
    folder_of(folder / "dcp")
    return sorted(path for path in folder.iterdir() if path.suffix or path.is_dir())


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
    num: int, audited: Converter, tmp_path: Path
) -> None:
    rng, originals = random.Random(num), seeds(tmp_path)
    for i in range(num):
        original, target = rng.choice(originals), tmp_path / "mutated"
        if original.is_dir():
            target = tmp_path / "mutated_dcp"
            target.mkdir(exist_ok=True)
            for path in original.iterdir():
                data = path.read_bytes()
                is_pickle = path.name == ".metadata"
                (target / path.name).write_bytes(mutate(data, rng) if is_pickle else data)
        elif original.suffix == ".ckpt" and original.stem != "legacy" and rng.random() < 0.7:
            with zipfile.ZipFile(original) as archive, zipfile.ZipFile(target, "w") as new:
                for info in archive.infolist():
                    data = archive.read(info)
                    is_pickle = info.filename.endswith("data.pkl")
                    new.writestr(info.filename, mutate(data, rng) if is_pickle else data)
        else:
            target.write_bytes(mutate(original.read_bytes(), rng))
        result, forbidden, *_ = audited.convert(target)
        assert not forbidden, (i, forbidden)
        assert not result.startswith("TRACEBACK"), (i, result)
        assert "\n" not in result, (i, result)
