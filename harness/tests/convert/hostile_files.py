"""Files that ask for more time or memory than they have bytes, each of about a given size.

`FILES` maps a name to a function of (folder, size in bytes) that returns the path. Pickles are
written by hand, opcode by opcode: `VALUES` push one value, `PICKLES` are whole ones.
"""

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

Maker = Callable[[int], bytes]  # a size -> opcodes or a whole pickle
File = Callable[[Path, int], Path]


def plain(value: object) -> bytes:
    """Opcodes that push a plain value and keep nothing."""
    return b"(" + b"".join(map(plain, value)) + b"t" if type(value) is tuple else dumped(value)


def dumped(value: object) -> bytes:
    if isinstance(value, str):
        content = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(content)) + content
    return pickle.dumps(value, 2)[2:-1]


def name_of(dotted: str) -> bytes:
    module, _, name = dotted.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def put(index: int) -> bytes:
    return b"r" + struct.pack("<I", index)


def get(index: int) -> bytes:
    return b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)


DICT = b"}("  # items follow, then "u"
ORDERED = name_of("collections.OrderedDict")
REBUILD = name_of("torch._utils._rebuild_tensor_v2")


def storage(key: str = "0", numel: int = 4, kind: str = "FloatStorage") -> bytes:
    return (
        b"(" + dumped("storage") + name_of(f"torch.{kind}") + plain((key, "cpu", numel))[1:] + b"Q"
    )


def tensor(
    shape: object = (4,), stride: object = (1,), offset: int = 0, place: bytes | None = None
) -> bytes:
    place = storage() if place is None else place
    return REBUILD + b"(" + place + plain((offset, shape, stride, False, None))[1:] + b"R"


def module(children: bytes = b"}", parameters: bytes = b"}") -> bytes:
    """A pickled nn.Module; the arguments push dicts."""
    state = dumped("_modules") + children + dumped("_parameters") + parameters
    return name_of("my.Module") + b")\x81" + DICT + state + b"ub"


def zipped(path: Path, data: bytes, records: dict[str, bytes] | None = None) -> Path:
    """Write what torch.save writes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        for key, content in ({"0": bytes(16)} | (records or {})).items():
            archive.writestr(f"archive/data/{key}", content)
        archive.writestr("archive/version", "3\n")
    return path


def program(body: bytes, weights: bytes | None = None) -> bytes:
    """A pickle of a dict that holds weights, and beside them what the body pushes."""
    weights = DICT + dumped("a") + tensor() + b"u" if weights is None else weights
    return b"\x80\x02" + DICT + dumped("state_dict") + weights + dumped("x") + body + b"u."


def beside(body: bytes) -> bytes:
    """A pickle of weights that hold a value which is none, so that it is searched for tensors."""
    return b"\x80\x02" + DICT + dumped("a") + tensor() + dumped("x") + body + b"u."


def repeated(item: bytes, size: int) -> bytes:
    return item * max(1, size // len(item))


def names_of_modules(n: int) -> bytes:
    """Names of a hundred parts, of which every one may be a wrapper."""
    name = "module." * 99
    weights = b"".join(dumped(f"{name}{i}") + get(9) for i in range(n // 710 + 1))
    return b"\x80\x02" + tensor() + put(9) + b"0" + DICT + weights + b"u."


def long_prefix(n: int) -> bytes:
    """A module of a long name with many parameters."""
    parameters = b"".join(dumped(f"{i:x}") + get(9) for i in range(n // 24 + 1))
    child = module(parameters=DICT + parameters + b"u")
    name = dumped("a" * min(n // 2, 60_000))
    return b"\x80\x02" + tensor() + put(9) + b"0" + module(DICT + name + child + b"u") + b"."


def one_tensor(n: int) -> bytes:
    """Many names of one tensor of many axes."""
    head = tensor((1,) * 64, (1,) * 64) + put(9) + b"0"
    names = b"".join(b"\x8c\x06%06x" % i + get(9) for i in range(n // 8))
    return b"\x80\x04" + head + DICT + names + b"u."


def averages(n: int) -> bytes:
    """Many entries that are called averages, all of them one large dict."""
    items = b"".join(dumped(f"{i:x}") + b"N" for i in range(n // 24))
    names = b"".join(dumped(f"ema{i:x}") + get(9) for i in range(n // 24))
    weights = DICT + dumped("a") + tensor() + items + b"u" + put(9)
    return b"\x80\x02" + DICT + dumped("state_dict") + weights + names + b"u."


PICKLES: dict[str, Maker] = {
    "averages": averages,
    "names_of_modules": names_of_modules,
    "long_prefix": long_prefix,
    "one_tensor": one_tensor,
}
VALUES: dict[str, Maker] = {
    "empty_lists": lambda n: b"](" + b"]" * n + b"e",
    "padded_lists": lambda n: b"](" + b"]" * (n // 5) + dumped("a" * (4 * n // 5)) + b"e",
    "long_deque": lambda n: name_of("collections.deque") + name_of("builtins.range")
        + dumped(10**8) + b"\x85R\x85R",
    "nested_lists": lambda n: b"]" * (n // 2 + 1) + b"a" * (n // 2),
    "instances": lambda n: b"](" + repeated(b"(ia\nb\n", n) + b"e",
    "memoized": lambda n: b"]" + b"\x94" * n,
    "long_ints": lambda n: b"\x8b" + struct.pack("<i", n // 2) + b"\1" * (n // 2) + put(8)
        + b"0}(" + repeated(b"h\x08N", n // 2) + b"u",
    "colliding_keys": lambda n: DICT + b"".join(
        dumped(7 + i * (2**61 - 1)) + b"N" for i in range(n // 12)
    ) + b"u",
    "hash_bomb": lambda n: b"}K\x01" + b"2\x86" * min(n // 2, 60) + b"Ns",
    "long_arguments": lambda n: ORDERED + put(8) + b"0(" + b"N" * (n // 2) + b"t" + put(9)
        + b"0](" + repeated(b"h\x08h\x09R", n // 2) + b"e",
    "long_shapes": lambda n: plain((1,) * (n // 8)) + put(9) + b"0" + storage() + put(8)
        + REBUILD + put(7) + b"00](" + repeated(b"h\x07(h\x08K\0h\x09h\x09\x89NtR", n // 2) + b"e",
    "copied_dicts": lambda n: ORDERED + put(8) + b"0](" + b"NN\x86" * (n // 6) + b"e" + put(9)
        + b"\x85" + put(10) + b"0](" + repeated(b"h\x08h\x0aR", n // 2) + b"e",
}  # fmt: skip


def views(kind: int) -> File:
    """Many views of one storage, each a little further on."""

    def make(folder: Path, n: int) -> Path:
        num = n // 81 + 1
        numel = max(n // 8, 4 * num, 1000)  # as large as the pickle
        shape, stride = [
            ((numel - num,), (1,)),
            ((1 << 20, (numel - num) // 2), (0, 2)),
            ((2,) * 60, (0,) * 50 + ((numel - num) // 20,) * 10),
        ][kind]  # fmt: skip
        head = (
            storage(numel=numel) + put(7) + b"0" + plain(shape) + put(8) + b"0"
            + plain(stride) + put(9) + b"0" + REBUILD + put(6) + b"0" + DICT
        )  # fmt: skip
        entries = (
            b"\x8c\x3c%060x" % i + get(6) + b"(" + get(7) + dumped(i) + get(8) + get(9) + b"\x89NtR"
            for i in range(num)
        )
        data = b"\x80\x04" + head + b"".join(entries) + b"u."
        return zipped(folder / "a", data, {"0": bytes(4 * numel)})

    return make


def expanded(folder: Path, n: int) -> Path:
    numel = 1 << 60
    return zipped(folder / "a", b"\x80\x02" + DICT + dumped("a") + tensor((numel,), (0,)) + b"u.")


def overlapping_entries(folder: Path, n: int) -> Path:
    """A zip of which many entries are one region of the file."""
    num = n // 120 + 2
    weights = b"".join(
        dumped(f"{i:x}") + tensor((1,), (1,), 0, storage(str(i), n // 4)) for i in range(num)
    )
    path = zipped(folder / "a", b"\x80\x02" + DICT + weights + b"u.", {"0": bytes(n // 4 * 4)})
    with zipfile.ZipFile(path, "a") as archive:
        infos = {info.filename: info for info in archive.infolist()}
        for i in range(1, num):
            info = zipfile.ZipInfo(f"archive/data/{i}")
            first = infos["archive/data/0"]
            info.header_offset, info.CRC = first.header_offset, first.CRC
            info.file_size = info.compress_size = first.file_size
            archive.filelist.append(info)
        archive.filelist.sort(key=lambda info: info.filename)
        archive._didModify = True
    return path


def many_entries(folder: Path, n: int) -> Path:
    """A zip with as many entries as its directory can name."""
    path = zipped(folder / "a", b"\x80\x02" + DICT + dumped("a") + tensor() + b"u.")
    with zipfile.ZipFile(path, "a") as archive:
        for i in range(n // 53):
            info = zipfile.ZipInfo(f"a/{i:05x}")
            info.header_offset = info.CRC = 0
            archive.filelist.append(info)
        archive._didModify = True
    return path


def tiny_tensors(folder: Path, n: int) -> Path:
    """As many tensors, each with a storage of its own, as there is room for."""
    num = n // 350
    weights = b"".join(
        dumped(f"{i:x}") + tensor((1,), (1,), 0, storage(str(i), 1)) for i in range(num)
    )
    data = b"\x80\x02" + DICT + weights + b"u."
    return zipped(folder / "a", data, {str(i): bytes(4) for i in range(num)})


def safetensors(path: Path, text: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return path


HEADERS: dict[str, Callable[[int], bytes]] = {
    "json_nested": lambda n: b'{"a":' + b"[" * n,
    "json_number": lambda n: b'{"a":' + b"7" * n + b"}",
    "json_tensors": lambda n: json.dumps(
        {f"{i:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(n // 50)},
        separators=(",", ":"),
    ).encode(),
}


def in_zip(make: Maker, wrap: Callable[[bytes], bytes] = bytes) -> File:
    return lambda folder, n: zipped(folder / "a", wrap(make(n)))


FILES: dict[str, File] = {
    **{name: in_zip(make, program) for name, make in VALUES.items()},
    **{f"{name}_beside": in_zip(make, beside) for name, make in VALUES.items()},
    **{name: in_zip(make) for name, make in PICKLES.items()},
    **{f"views_{kind}": views(kind) for kind in range(3)},
    **{
        name: (lambda folder, n, make=make: safetensors(folder / "a", make(n)))
        for name, make in HEADERS.items()
    },
    "expanded": expanded,
    "overlapping_entries": overlapping_entries,
    "many_entries": many_entries,
    "tiny_tensors": tiny_tensors,
}
