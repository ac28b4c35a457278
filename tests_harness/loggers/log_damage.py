"""Damage to a run's logs, as disks, editors and hands do it."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

PAGE = 4096
Change = Callable[[bytes, random.Random], bytes]


def zeroed(size: int) -> Change:
    def change(data: bytes, rng: random.Random) -> bytes:
        start = rng.randrange(max(1, len(data) - size))
        return data[:start] + bytes(min(size, len(data) - start)) + data[start + size :]

    return change


def flipped(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def other_digit(data: bytes, rng: random.Random) -> bytes:
    place = rng.choice([i for i, byte in enumerate(data) if 48 <= byte < 58])
    other = rng.choice([d for d in b"0123456789" if d != data[place]])
    return data[:place] + bytes([other]) + data[place + 1 :]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def taken_out(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.randrange(1, 200) :]


def put_in(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + rng.randbytes(rng.randrange(1, 50)) + data[start:]


def appended(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 500))


def on_lines(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Change:
    return lambda data, rng: b"\n".join(change(data.split(b"\n"), rng))


def merged(lines: list[bytes], rng: random.Random) -> list[bytes]:
    place = rng.randrange(len(lines) - 2)
    return [*lines[:place], lines[place].rstrip() + lines[place + 1], *lines[place + 2 :]]


def swapped(lines: list[bytes], rng: random.Random) -> list[bytes]:
    i, j = rng.sample(range(1, len(lines) - 1), 2)
    lines[i], lines[j] = lines[j], lines[i]
    return lines


def twice(lines: list[bytes], rng: random.Random) -> list[bytes]:
    place = rng.randrange(1, len(lines) - 1)
    return [*lines[:place], lines[place], *lines[place:]]


def without_a_line(lines: list[bytes], rng: random.Random) -> list[bytes]:
    place = rng.randrange(len(lines) - 1)
    return lines[:place] + lines[place + 1 :]


def without_a_column(lines: list[bytes], rng: random.Random) -> list[bytes]:
    place = rng.randrange(lines[0].count(b",") + 1)
    cells = [line.rstrip(b"\r").split(b",") for line in lines]
    return [b",".join(row[:place] + row[place + 1 :]) for row in cells]


OF_ANY_FILE: dict[str, Change] = {
    "emptied": lambda data, rng: b"",
    "all zeros": lambda data, rng: bytes(len(data)),
    "a page of zeros": zeroed(PAGE),
    "eight zero bytes": zeroed(8),
    "a flipped bit": flipped,
    "cut": cut,
    "bytes taken out": taken_out,
    "bytes put in": put_in,
    "bytes appended": appended,
    "noise": lambda data, rng: rng.randbytes(len(data)),
}
OF_A_TABLE: dict[str, Change] = OF_ANY_FILE | {
    "another digit": other_digit,
    "merged rows": on_lines(merged),
    "swapped rows": on_lines(swapped),
    "a row twice": on_lines(twice),
    "a line deleted": on_lines(without_a_line),
    "a column deleted": on_lines(without_a_column),
    "other ends of lines": lambda data, rng: data.replace(b"\r\n", b"\n"),
    "no last line's end": lambda data, rng: data.rstrip(),
}


def damage(path: Path, kind: str, seed: int) -> None:
    """Change a file, or remove it, or its folder."""
    rng = random.Random(f"{kind} {seed}")
    if kind == "deleted":
        path.unlink()
    elif kind == "folder deleted":
        shutil.rmtree(path.parent)
    else:
        path.write_bytes(OF_A_TABLE[kind](path.read_bytes(), rng))
