"""Pickles written by hand, opcode by opcode, without torch, and the files that hold them."""

import pickle
import struct
import zipfile
from pathlib import Path


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


def legacy(path: Path, data: bytes, keys: bytes = b"](X\1\0\0\x000e", numel: int = 4) -> Path:
    head = b"".join(
        pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    )
    content = struct.pack("<Q", numel) + bytes(4 * numel)
    path.write_bytes(head + data + b"\x80\x02" + keys + b"." + content)
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
