"""Compare a new file with its source, byte by byte, by checksums."""

from collections.abc import Mapping

from .layout import target_dtype
from .stream import BLOCK, crc32, read, stream
from .tensors import CheckpointError, Record, Tensor


def verify(source: Mapping[str, Tensor], new: Mapping[str, Tensor], dtype: str) -> None:
    """Raise unless `new` holds exactly the tensors of `source`, converted to `dtype`.

    Where the source states the checksum of a tensor's bytes, the new bytes are compared with
    that: one reading then finds damage of either file.

    Raises:
        CheckpointError: names the tensor, and which of the files is at fault.
    """
    buffer = memoryview(bytearray(BLOCK))
    if list(source) != list(new):
        raise CheckpointError(_NOT_WRITTEN.format("the list of tensors"))
    partly_read: dict[Record, str] = {}
    for name, old in source.items():
        copy, wanted = new[name], target_dtype(old, dtype)
        if (copy.dtype, copy.shape) != (wanted, old.shape):
            raise CheckpointError(_NOT_WRITTEN.format(name))
        if old.is_dense and copy.stride == old.stride:  # compare as they lie, without gathering
            old, copy = (t.flat(t.offset, t.offset + t.span) for t in (old, copy))
        record = old.whole_record if wanted == old.dtype else None
        stated = record.crc if record else None
        if stated is None:
            shards = old.load_shards() if old.load_shards else [((), old)]
            partly_read.update({s.record: name for _, s in shards if s.record})
        if copy.record and not copy.whole_record:
            partly_read[copy.record] = name
        expected = crc32(stream(old, wanted, buffer)) if stated is None else stated
        actual = crc32(stream(copy, wanted, buffer))
        indexed = copy.whole_record.crc if copy.whole_record else None
        if actual != expected or indexed not in (None, actual):
            if record:
                _check(record, name, buffer)
            raise CheckpointError(_NOT_WRITTEN.format(name))
    for record, name in partly_read.items():
        _check(record, name, buffer)


_NOT_WRITTEN = "{} was not written as it is in the source: a failing disk or memory"


def _check(record: Record, name: str, buffer: memoryview) -> None:
    if record.crc not in (None, crc32(read(record, 0, record.num_bytes, buffer))):
        raise CheckpointError(f"damaged: {name} does not match its checksum; copy the file again")
