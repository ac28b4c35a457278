"""Pickles that ask for more time or memory than they have bytes.

`VALUES` are opcodes that push one value, `PICKLES` are whole ones, whose names and modules ask.
"""

import random
import struct
from collections.abc import Callable

from .opcodes import (
    DICT,
    ORDERED,
    REBUILD,
    dumped,
    get,
    module,
    name_of,
    plain,
    put,
    repeated,
    storage,
    tensor,
)

Random = random.Random
Maker = Callable[[int, Random], bytes]  # (size, rng) -> opcodes or a whole pickle


def names_of_modules(n: int, rng: Random) -> bytes:
    """Names of a hundred parts, of which every one may be a wrapper."""
    name = "module." * 99
    weights = b"".join(dumped(f"{name}{i}") + get(9) for i in range(n // 710 + 1))
    return b"\x80\x02" + tensor() + put(9) + b"0" + DICT + weights + b"u."


def long_prefix(n: int, rng: Random) -> bytes:
    """A module of a long name with many parameters."""
    parameters = b"".join(dumped(f"{i:x}") + get(9) for i in range(n // 24 + 1))
    child = module(parameters=DICT + parameters + b"u")
    name = dumped("a" * min(n // 2, 60_000))
    return b"\x80\x02" + tensor() + put(9) + b"0" + module(DICT + name + child + b"u") + b"."


def one_tensor(n: int, rng: Random) -> bytes:
    """Many names of one tensor, perhaps of many axes."""
    num_axes = rng.choice([1, 64])
    head = tensor((1,) * num_axes, (1,) * num_axes) + put(9) + b"0"
    names = b"".join(b"\x8c\x05%05x" % i + get(9) for i in range(n // 8))
    return b"\x80\x04" + head + DICT + names + b"u."


PICKLES: dict[str, Maker] = {
    "names_of_modules": names_of_modules,
    "long_prefix": long_prefix,
    "one_tensor": one_tensor,
}
VALUES: dict[str, Maker] = {
    "empty_lists": lambda n, _: b"](" + b"]" * n + b"e",
    "padded_lists": lambda n, _: b"](" + b"]" * (n // 5) + dumped("a" * (4 * n // 5)) + b"e",
    "empty_dicts": lambda n, _: b"](" + b"}" * n + b"e",
    "long_deque": lambda n, _: name_of("collections.deque") + name_of("builtins.range")
        + dumped(10**8) + b"\x85R\x85R",
    "nested_lists": lambda n, _: b"]" * (n // 2 + 1) + b"a" * (n // 2),
    "instances": lambda n, _: b"](" + repeated(b"(ia\nb\n", n) + b"e",
    "memoized": lambda n, _: b"]" + b"\x94" * n,
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
    "long_shapes": lambda n, _: plain((1,) * (n // 8)) + put(9) + b"0" + storage() + put(8)
        + REBUILD + put(7) + b"00](" + repeated(b"h\x07(h\x08K\0h\x09h\x09\x89NtR", n // 2) + b"e",
    "copied_dicts": lambda n, _: ORDERED + put(8) + b"0](" + b"NN\x86" * (n // 6) + b"e" + put(9)
        + b"\x85" + put(10) + b"0](" + repeated(b"h\x08h\x0aR", n // 2) + b"e",
}  # fmt: skip
