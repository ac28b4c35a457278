"""Write tensors as a new file, torch.save's zip or safetensors, and compare the file with them.

In: Tensors by name. Out: the file, and the checksum that each tensor's bytes must have in it;
`verify` reads the file again and compares.
"""

import json
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any, BinaryIO, cast

from .stream import check, crc32, read, stream
from .tensors import DTYPES, CheckpointError, Record, Tensor, row_major, target_dtype

_ALIGNMENT = 64  # bytes, as torch.save does: torch.load(mmap=True) gives aligned tensors
_PADDING = 0x4246  # "FB", the extra field with which torch.save itself aligns its records
Checksums = dict[str, int]  # by the tensors' names


def write_pt(file: BinaryIO, tensors: Mapping[str, Tensor], dtype: str) -> Checksums:
    """Write torch.save's format: an OrderedDict of CPU tensors; names of one tensor share it.

    Raises:
        CheckpointError: an element cannot become `dtype`.
        OSError: the disk is full, or the system refuses to write.
    """
    numbers: dict[Tensor, int] = {}
    crcs: list[int] = []
    pickled = [b"\x80\x02", _global("collections.OrderedDict"), b")R("]
    for name, tensor in tensors.items():
        number = numbers.setdefault(tensor, len(numbers))
        pickled += [_plain(name), *_pickled(tensor, dtype, number)]
    with zipfile.ZipFile(file, "w") as archive:
        _add(archive, "data.pkl", b"".join([*pickled, b"u."]))
        _add(archive, "byteorder", b"little")
        _add(archive, "version", b"3\n")
        for name, tensor in tensors.items():
            if numbers[tensor] == len(crcs):
                crcs.append(_add(archive, f"data/{len(crcs)}", tensor, dtype, name))
    return {name: crcs[numbers[tensor]] for name, tensor in tensors.items()}


def _add(
    archive: zipfile.ZipFile, entry: str, content: bytes | Tensor, dtype: str = "", name: str = ""
) -> int:
    """Add an aligned entry. `archive.open` would compute a checksum that the source has already."""
    file, info = cast(BinaryIO, archive.fp), zipfile.ZipInfo(f"archive/{entry}")
    info.header_offset, info.CRC = archive.start_dir, 0
    info.file_size = len(content) if isinstance(content, bytes) else content.num_bytes_as(dtype)
    info.compress_size = info.file_size
    padding = -(info.header_offset + len(info.FileHeader()) + 4) % _ALIGNMENT
    info.extra = struct.pack("<2H", _PADDING, padding) + bytes(padding)
    file.seek(info.header_offset + len(info.FileHeader()))
    if isinstance(content, bytes):
        info.CRC = zlib.crc32(content)
        file.write(content)
    else:
        info.CRC = _copy(file, content, dtype, name)
    archive.start_dir = file.tell()
    file.seek(info.header_offset)
    file.write(info.FileHeader())
    archive.filelist.append(info)
    return info.CRC


def _pickled(tensor: Tensor, dtype: str, number: int) -> list[bytes]:
    """Return what torch pickles for a CPU tensor that is the whole of a numbered storage."""
    num_bytes, dtype = tensor.num_bytes_as(dtype), target_dtype(tensor, dtype)
    kind = DTYPES[dtype].storage  # or it lies in a storage of bytes
    return [
        _global(f"torch._utils._rebuild_tensor_v{2 if kind else 3}"),
        *(b"((", _plain("storage"), _global(f"torch.{kind or 'storage.UntypedStorage'}")),
        *(_plain(str(number)), _plain("cpu"), _plain(tensor.numel if kind else num_bytes), b"tQ"),
        *map(_plain, (0, tensor.shape, row_major(tensor.shape), False)),
        *(_global("collections.OrderedDict"), b")R", b"" if kind else _global(f"torch.{dtype}")),
        b"tR",
    ]


def _plain(value: Any) -> bytes:
    """Return the opcodes that push a value."""
    return pickle.dumps(value, 2)[2:-1]  # without the protocol and the end


@cache
def _global(name: str) -> bytes:
    return "c{}\n{}\n".format(*name.rsplit(".", 1)).encode()


def write_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], dtype: str) -> Checksums:
    """Write the safetensors format, which has no sharing; errors are those of `write_pt`."""
    codes = {name: DTYPES[target_dtype(tensor, dtype)] for name, tensor in tensors.items()}
    names = sorted(tensors, key=lambda name: -codes[name].size)  # every tensor is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, code = tensors[name], codes[name].safetensors
        if code is None or name in header:
            what = "this name" if code else tensor.dtype
            raise CheckpointError(f"{name}: safetensors cannot hold {what}; write a .pt")
        start, end = end, end + tensor.num_bytes_as(dtype)
        header[name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    return {name: _copy(file, tensors[name], dtype, name) for name in names}


def _copy(file: BinaryIO, tensor: Tensor, dtype: str, name: str) -> int:
    """Copy a tensor's elements, and return their checksum: the source's, where it states one."""
    dtype = target_dtype(tensor, dtype)
    stated = tensor.stated_crc if dtype == tensor.dtype else None
    crc = stated or 0
    for chunk in stream(tensor, dtype, name):
        if stated is None:
            crc = zlib.crc32(chunk, crc)
        file.write(chunk)
    return crc


def verify(
    tensors: Mapping[str, Tensor], dtype: str, checksums: Checksums, copies: Mapping[str, Tensor]
) -> None:
    """Raise a CheckpointError unless a new file, read as `copies`, holds what it should.

    Where the source states a checksum for exactly a tensor's bytes, the new file's are compared
    with that: one reading finds damage of either. Other records of the source are read again.
    """
    if tensors.keys() != copies.keys():
        raise CheckpointError("the names of its tensors were not written as they are")
    written: dict[Record, int] = {}  # checksums of the new file
    checked: set[Record] = set()  # of the source
    for name, tensor in tensors.items():
        copy, wanted = copies[name], target_dtype(tensor, dtype)
        record = copy.record
        if record not in written:
            written[record] = crc32(read(record, 0, record.num_bytes))
        is_whole = copy.is_contiguous and copy.num_bytes == record.num_bytes
        is_same = is_whole and (copy.dtype, copy.shape) == (wanted, tensor.shape)
        if not is_same or written[record] != checksums[name]:
            raise CheckpointError(
                f"damaged: {name} does not match its checksum; copy the file again, and if that "
                "does not help, the disk to which the new file is written fails"
            )
        if (tensor.stated_crc is None or wanted != tensor.dtype) and tensor.record not in checked:
            check(tensor.record, name)
            checked.add(tensor.record)
