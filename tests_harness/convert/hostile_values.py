"""Values that ask for more time or memory than they have bytes, as opcodes that push them."""

import random
import struct
from collections.abc import Callable, Iterator

from .opcodes import DICT, ORDERED, REBUILD, dumped, get, name_of, plain, put, repeated, storage

Random = random.Random


def orbit(num: int, rng: Random) -> Iterator[int]:
    """Integers that fill a dict along its own way of probing, then others that start there."""
    bits = max(3, (num * 3 // 2).bit_length())
    slot = rng.randrange(1 << bits)
    for _ in range(num * 2 // 3):
        yield slot
        slot = (5 * slot + 1) % (1 << bits)
    for i in range(num // 3):
        slot = (5 * slot + 1) % (1 << bits)
        yield slot + ((i % 1000 + 1) << bits)


Maker = Callable[[int, Random], bytes]  # (size, rng) -> what pushes one value
VALUES: dict[str, Maker] = {
    "lists": lambda n, _: b"](" + repeated(b"]", n) + b"e",
    "nested_lists": lambda n, _: b"]" * (n // 2 + 1) + b"a" * (n // 2),
    "nested_tuples": lambda n, _: b"N" + b"\x85" * n,
    "calls": lambda n, _: name_of("a.B") + repeated(b")R", n),
    "instances": lambda n, _: b"](" + repeated(b"(ia\nb\n", n) + b"e",
    "states": lambda n, _: name_of("a.B") + b")R" + repeated(b"}b", n),
    "marks": lambda n, _: b"(" * (n // 2) + b"1" * (n // 2) + b"N",
    "memoized": lambda n, _: b"]" + b"\x94" * n,
    "put_orbit": lambda n, rng: b"]" + b"".join(map(put, orbit(n // 5, rng))),
    "globals": lambda n, _: b"](" + b"".join(
        name_of(f"a.{i:x}") for i in range(n // 8)
    ) + b"e",
    "stack_globals": lambda n, _: dumped("m" * 990) + put(8) + b"0](" + b"".join(
        get(8) + b"\x8c\3" + b"%03x" % (i % 4096) + b"\x93" for i in range(n // 8)
    ) + b"e",
    "long_ints": lambda n, _: b"\x8b" + struct.pack("<i", n // 2) + b"\1" * (n // 2) + put(8)
        + b"0}(" + repeated(b"h\x08N", n // 2) + b"u",
    "long_text_int": lambda n, _: b"L" + b"7" * n + b"L\n",
    "wide_text": lambda n, _: dumped("\U0001f600" + "a" * n),
    "colliding_keys": lambda n, _: DICT + b"".join(
        dumped(7 + i * (2**61 - 1)) + b"N" for i in range(n // 12)
    ) + b"u",
    "hash_bomb": lambda n, _: b"}K\x01" + b"2\x86" * min(n // 2, 60) + b"Ns",
    "long_arguments": lambda n, _: ORDERED + put(8) + b"0(" + b"N" * (n // 2) + b"t" + put(9)
        + b"0](" + repeated(b"h\x08h\x09R", n // 2) + b"e",
    "long_tensors": lambda n, _: REBUILD + put(8) + b"0(" + b"N" * (n // 2) + b"t" + put(9)
        + b"0](" + repeated(b"h\x08h\x09R", n // 2) + b"e",
    "long_shapes": lambda n, _: plain((1,) * (n // 8)) + put(9) + b"0" + storage() + put(8)
        + REBUILD + put(7) + b"00](" + repeated(b"h\x07(h\x08K\0h\x09h\x09\x89NtR", n // 2) + b"e",
    "copied_dicts": lambda n, _: ORDERED + put(8) + b"0](" + b"NN\x86" * (n // 6) + b"e" + put(9)
        + b"\x85" + put(10) + b"0](" + repeated(b"h\x08h\x0aR", n // 2) + b"e",
    "subclasses": lambda n, _: name_of("torch._tensor._rebuild_from_type_v2") + put(8) + b"0("
        + b"h\x08" * (n // 4) + b"t" + put(9) + b"0](" + repeated(b"h\x08h\x09R", n // 2) + b"e",
}  # fmt: skip
