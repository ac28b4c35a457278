"""Write tensors to a new file, torch.save's zip or safetensors, and verify the file.

In: ``StoredTensor``s by name. Out: the file, and the checksum of each tensor's bytes. ``verify``
reads the file again and compares it with the tensors and the checksums.
"""

import json
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any, BinaryIO, cast

from .tensors import DTYPES, CheckpointError, StoredTensor, check, row_major, stream

_ALIGNMENT = 64  # bytes, as in torch.save: torch.load(mmap=True) then gives aligned tensors
_PADDING = 0x4246  # "FB", the zip's extra field that torch.save pads with


def write_pt(file: BinaryIO, tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Write torch.save's format: an OrderedDict of CPU tensors. Return a checksum per name.

    Two names of the same tensor share its bytes.

    Raises:
        CheckpointError: the source is damaged.
        OSError: the disk is full, or the system cannot write.
    """
    numbers: dict[StoredTensor, int] = {}
    crcs: list[int] = []
    pickled = [b"\x80\x02", _global("collections.OrderedDict"), b")R("]
    for name, tensor in tensors.items():
        number = numbers.setdefault(tensor, len(numbers))
        pickled += [_plain(name), *_pickled(tensor, number)]
    with zipfile.ZipFile(file, "w") as archive:
        texts = {"data.pkl": b"".join([*pickled, b"u."]), "byteorder": b"little", "version": b"3\n"}
        for entry, text in texts.items():  # ZipInfo's date is fixed: equal inputs, equal files
            archive.writestr(zipfile.ZipInfo(f"archive/{entry}"), text)
        for name, tensor in tensors.items():
            if numbers[tensor] == len(crcs):
                crcs.append(_add(archive, f"archive/data/{len(crcs)}", tensor, name))
    return {name: crcs[numbers[tensor]] for name, tensor in tensors.items()}


def _add(archive: zipfile.ZipFile, entry: str, tensor: StoredTensor, name: str) -> int:
    """Add an aligned entry with a tensor's bytes, and return its checksum.

    ``archive.open`` would compute the checksum, which the source may state already.
    """
    file, info = cast(BinaryIO, archive.fp), zipfile.ZipInfo(entry)
    info.header_offset, info.CRC = archive.start_dir, 0
    info.file_size = info.compress_size = tensor.num_bytes
    padding = -(info.header_offset + len(info.FileHeader()) + 4) % _ALIGNMENT
    info.extra = struct.pack("<2H", _PADDING, padding) + bytes(padding)
    file.seek(info.header_offset + len(info.FileHeader()))
    info.CRC = _copy(file, tensor, name)
    archive.start_dir = file.tell()
    file.seek(info.header_offset)
    file.write(info.FileHeader())
    archive.filelist.append(info)
    return info.CRC


def _pickled(tensor: StoredTensor, number: int) -> list[bytes]:
    """Return torch's pickle of a CPU tensor that fills the storage of this number."""
    kind = DTYPES[tensor.dtype].storage  # None: a storage of bytes
    num_elements = math.prod(tensor.shape) if kind else tensor.num_bytes
    dtype = b"" if kind else _global(f"torch.{tensor.dtype}")
    return [
        _global(f"torch._utils._rebuild_tensor_v{2 if kind else 3}"),
        *(b"((", _plain("storage"), _global(f"torch.{kind or 'storage.UntypedStorage'}")),
        *(_plain(str(number)), _plain("cpu"), _plain(num_elements), b"tQ"),
        *map(_plain, (0, tensor.shape, row_major(tensor.shape), False)),
        *(_global("collections.OrderedDict"), b")R", dtype, b"tR"),
    ]


def _plain(value: Any) -> bytes:
    """Return the opcodes that push a value."""
    return pickle.dumps(value, 2)[2:-1]  # without the opcodes of protocol and end


@cache
def _global(name: str) -> bytes:
    return "c{}\n{}\n".format(*name.rsplit(".", 1)).encode()


def write_safetensors(file: BinaryIO, tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Write the safetensors format. Return the same, and raise the same errors, as ``write_pt``.

    Two names of the same tensor get a copy each: the format cannot share bytes.
    """
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)  # aligns every tensor
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor, code = tensors[name], DTYPES[tensors[name].dtype].safetensors
        if code is None or name in header:
            unsupported = "this name" if code else tensor.dtype
            raise CheckpointError(f"{name}: safetensors cannot hold {unsupported}; use -o *.pt")
        start, end = end, end + tensor.num_bytes
        header[name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    return {name: _copy(file, tensors[name], name) for name in names}


def _copy(file: BinaryIO, tensor: StoredTensor, name: str) -> int:
    """Copy a tensor's elements, and return their checksum.

    If the source states the checksum of exactly these bytes, return it without computing it:
    ``verify`` compares the new file with it, which finds damage of either file. Otherwise check
    the source now, and compute the checksum of the elements.
    """
    stated, crc = tensor.record.crc if tensor.is_whole else None, 0
    if stated is None:
        check(tensor.record, name)
    for chunk in stream(tensor):
        if stated is None:
            crc = zlib.crc32(chunk, crc)
        file.write(chunk)
    return crc if stated is None else stated


def verify(
    tensors: Mapping[str, StoredTensor],
    checksums: Mapping[str, int],
    copies: Mapping[str, StoredTensor],
) -> None:
    """Raise a CheckpointError unless the new file's tensors, ``copies``, equal the source's."""
    if tensors.keys() != copies.keys():
        raise CheckpointError("verification failed: the output has other tensor names")
    for name, copy in copies.items():
        expected = (tensors[name].dtype, tensors[name].shape)
        if not copy.is_whole or (copy.dtype, copy.shape) != expected:
            raise CheckpointError(f"verification failed: {name} has another type or shape")
        copy.record.crc = checksums[name]  # in place of the checksum that the new file states
        check(copy.record, name)
