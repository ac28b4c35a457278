"""Files that ask for more time or memory than they have bytes, each of about a given size.

`FILES` maps a name to a function of (folder, size in bytes) that returns the path. Their pickles
are written by hand, opcode by opcode: `VALUES` are opcodes that push one value.
"""

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

from torch import nn

File = Callable[[Path, int], Path]


def push(*values: object) -> bytes:
    """Opcodes that push plain values, and leave the memo as it is."""
    return b"".join(map(_push, values))


def _push(value: object) -> bytes:
    if isinstance(value, tuple):
        return b"(" + push(*value) + b"t"
    if isinstance(value, str):
        return b"X" + struct.pack("<I", len(value)) + value.encode()
    return pickle.dumps(value, 2)[2:-1]


def name_of(dotted: str) -> bytes:
    return "c{}\n{}\n".format(*dotted.rsplit(".", 1)).encode()


START = b"\x80\x04"
DICT = b"}("  # items follow, then "u"
KEEP, AGAIN = b"q\x09", b"h\x09"  # puts the last value into the memo; pushes it again
ORDERED, REBUILD = name_of("collections.OrderedDict"), name_of("torch._utils._rebuild_tensor_v2")


def storage(key: str = "0", numel: int = 4) -> bytes:
    return b"(" + push("storage") + name_of("torch.FloatStorage") + push(key, "cpu", numel) + b"tQ"


def tensor(shape: object = (4,), stride: object = (1,), place: bytes = storage()) -> bytes:
    return REBUILD + b"(" + place + push(0, shape, stride, False, None) + b"tR"


def module(children: bytes, parameters: bytes = b"}") -> bytes:
    """A pickled nn.Module; the arguments push dicts."""
    state = push("_modules") + children + push("_parameters") + parameters
    return name_of("my.Module") + b")\x81" + DICT + state + b"ub"


def zipped(path: Path, data: bytes, records: dict[str, bytes] | None = None) -> Path:
    """Write what torch.save writes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for key, content in ({"0": bytes(16)} | (records or {})).items():
            archive.writestr(f"archive/data/{key}", content)
        archive.writestr("archive/version", "3\n")
    return path


def beside(body: bytes) -> bytes:
    """A pickle of weights that hold a value which is none, so that it is searched for tensors."""
    return START + DICT + push("a") + tensor() + push("x") + body + b"u."


def repeated(item: bytes, size: int) -> bytes:
    return item * max(1, size // len(item))


VALUES: dict[str, Callable[[int], bytes]] = {
    "empty_lists": lambda n: b"](" + b"]" * n + b"e",
    "padded_lists": lambda n: b"](" + b"]" * (n // 5) + push("a" * (4 * n // 5)) + b"e",
    "nested_lists": lambda n: b"]" * (n // 2 + 1) + b"a" * (n // 2),
    "long_deque": lambda n: name_of("collections.deque") + name_of("builtins.range")
        + push(10**8) + b"\x85R\x85R",
    "memoized": lambda n: b"]" + b"\x94" * n,
    "long_memo": lambda n: b"Nr\xff\xff\xff\x7f",
    "huge_bytes": lambda n: b"\x8e" + struct.pack("<Q", 1 << 50) + b"x",
    "colliding_keys": lambda n: DICT + b"".join(
        push(7 + i * (2**61 - 1), None) for i in range(n // 12)
    ) + b"u",
    # A dict whose key is a tuple of 2 ** 60 numbers, were it ever hashed.
    "hash_bomb": lambda n: b"}K\x01" + b"2\x86" * 60 + b"Ns",
    # A storage whose name would have 2 ** 60 characters.
    "name_bomb": lambda n: b"(" + push("storage") + name_of("torch.FloatStorage") + b"K\x01"
        + b"2\x86" * 60 + push("cpu", 1) + b"tQ",
    "long_arguments": lambda n: ORDERED + b"q\x080(" + b"N" * (n // 2) + b"t" + KEEP
        + b"0](" + repeated(b"h\x08" + AGAIN + b"R", n // 2) + b"e",
    # Few enough opcodes that their number is not refused: what they copy is.
    "copied_dicts": lambda n: ORDERED + b"q\x080](" + b"NN\x86" * 60_000 + b"e\x85" + KEEP
        + b"0](" + (b"h\x08" + AGAIN + b"R") * 20_000 + b"e",
}  # fmt: skip


def names_of_modules(n: int) -> bytes:
    """Names of a hundred parts, of which every one may be a wrapper."""
    name = "module." * 99
    weights = b"".join(push(f"{name}{i}") + AGAIN for i in range(n // 710 + 1))
    return START + tensor() + KEEP + b"0" + DICT + weights + b"u."


def long_prefix(n: int) -> bytes:
    """A module of a long name with many parameters."""
    parameters = b"".join(push(f"{i:x}") + AGAIN for i in range(n // 24 + 1))
    child = module(b"}", DICT + parameters + b"u")
    name = push("a" * min(n // 2, 60_000))
    return START + tensor() + KEEP + b"0" + module(DICT + name + child + b"u") + b"."


def one_tensor(n: int) -> bytes:
    """Many names of one tensor of many axes."""
    names = b"".join(b"\x8c\x06%06x" % i + AGAIN for i in range(n // 8))
    return START + tensor((1,) * 64, (1,) * 64) + KEEP + b"0" + DICT + names + b"u."


def averages(n: int) -> bytes:
    """Many entries that are called averages, all of them one large dict."""
    items = b"".join(push(f"{i:x}", None) for i in range(n // 24))
    names = b"".join(push(f"ema{i:x}") + AGAIN for i in range(n // 24))
    weights = DICT + push("a") + tensor() + items + b"u" + KEEP
    return START + DICT + push("state_dict") + weights + names + b"u."


def endless_tower(n: int) -> bytes:
    """Pickled modules that contain each other so often that it comes to 2 ** 60."""
    tower = nn.Module()
    for _ in range(60):
        floor = nn.Module()
        floor.left = floor.right = tower
        tower = floor
    return pickle.dumps(tower, 2)


PICKLES = (names_of_modules, long_prefix, one_tensor, averages, endless_tower)


def views(step: int) -> File:
    """Many views of one storage, of one element in so many, each a little further on."""

    def make(folder: Path, n: int) -> Path:
        num = n // 81 + 1
        numel = max(n // 8, 4 * num, 1000)  # as large as the pickle
        head = (
            storage(numel=numel) + b"q\x070" + push(((numel - num) // step,)) + b"q\x080"
            + push((step,)) + KEEP + b"0" + REBUILD + b"q\x060" + DICT
        )  # fmt: skip
        entries = (
            b"\x8c\x3c%060x" % i + b"h\x06(h\x07" + push(i) + b"h\x08" + AGAIN + b"\x89NtR"
            for i in range(num)
        )
        data = START + head + b"".join(entries) + b"u."
        return zipped(folder / "a", data, {"0": bytes(4 * numel)})

    return make


def expanded(folder: Path, n: int) -> Path:
    return zipped(folder / "a", START + DICT + push("a") + tensor((1 << 60,), (0,)) + b"u.")


def in_storages(num: int, numel: int) -> bytes:
    """A pickle of tensors of one element, each with a storage of its own."""
    weights = (push(f"{i:x}") + tensor((1,), place=storage(str(i), numel)) for i in range(num))
    return START + DICT + b"".join(weights) + b"u."


def tiny_tensors(folder: Path, n: int) -> Path:
    num = n // 350
    return zipped(folder / "a", in_storages(num, 1), {str(i): bytes(4) for i in range(num)})


def overlapping_entries(folder: Path, n: int) -> Path:
    """A zip of which many entries are one region of the file."""
    num = n // 120 + 2
    path = zipped(folder / "a", in_storages(num, n // 4), {"0": bytes(n // 4 * 4)})
    with zipfile.ZipFile(path, "a") as archive:
        first = archive.getinfo("archive/data/0")
        for i in range(1, num):
            info = zipfile.ZipInfo(f"archive/data/{i}")
            info.header_offset, info.CRC = first.header_offset, first.CRC
            info.file_size = info.compress_size = first.file_size
            archive.filelist.append(info)
        archive._didModify = True
    return path


def safetensors(header: Callable[[int], bytes]) -> File:
    def make(folder: Path, n: int) -> Path:
        text = header(n)
        (folder / "a").write_bytes(struct.pack("<Q", len(text)) + text)
        return folder / "a"

    return make


def json_tensors(n: int) -> bytes:
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return json.dumps({f"{i:x}": entry for i in range(n // 50)}, separators=(",", ":")).encode()


def in_zip(pickled: Callable[[int], bytes]) -> File:
    return lambda folder, n: zipped(folder / "a", pickled(n))


FILES: dict[str, File] = {
    **{name: in_zip(lambda n, push=make: beside(push(n))) for name, make in VALUES.items()},
    **{make.__name__: in_zip(make) for make in PICKLES},
    **{f"views_{step}": views(step) for step in (1, 64)},
    "expanded": expanded,
    "overlapping_entries": overlapping_entries,
    "tiny_tensors": tiny_tensors,
    "json_tensors": safetensors(json_tensors),
    "json_nested": safetensors(lambda n: b'{"a":' + b"[" * n),
}
