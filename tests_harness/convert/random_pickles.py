"""Random pickles that use every opcode: nested, shared by the memo and by DUP, mostly valid."""

import random
import struct
from pathlib import Path

from .hostile_values import VALUES
from .opcodes import DICT, dumped, get, legacy, module, name_of, plain, put, storage, tensor, zipped

GLOBALS = (
    "collections.OrderedDict",
    "collections.defaultdict",
    "builtins.set",
    "torch.Size",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_sparse_tensor",
    "torch._tensor._rebuild_from_type_v2",
    "torch.nn.modules.linear.Linear",
    "torch.float32",
    "os.system",
    "builtins.eval",
)
NUMBERS = (0, 1, 2, 7, 64, -1, 2**31, 2**61 - 1, 2**63 - 1, 2**63, 2**64, 10**40, 1 << 3000)
SIZES = (0, 1, 2, 7, 64, 2**20, 2**31, 2**40)  # of expanded axes
NAMES = (
    "",
    "a",
    "b.c",
    "module.a",
    "module.module.b",
    "_modules",
    "_parameters",
    "ema.a",
    "0",
    "\n",
)
LITERALS = (
    *(b"N", b"\x88", b"\x89", b"]", b"}", b")", b"\x8f", b"K\1", b"M\1\2", b"J\1\2\3\4", b"I01\n"),
    *(b"I7\n", b"L7L\n", b"F1e300\n", b"G\1\2\3\4\5\6\7\x08", b"S'a'\n", b"Va\n", b"U\1a", b"C\1a"),
    *(b"T\1\0\0\0a", b"B\1\0\0\0a", b"X\1\0\0\0a", b"\x8c\1a", b"\x8a\1\7", b"\x8b\1\0\0\0\7"),
    *(b"\x8d\1" + bytes(7) + b"a", b"\x8e\1" + bytes(7) + b"a", b"\x96\1" + bytes(7) + b"a"),
    *(b"\x82\1", b"\x83\1\0", b"\x84\1\0\0\0", b"\x95" + bytes(8) + b"N"),
    *(b"N0N", b"(NN1N", b"C\0\x98"),
)  # fmt: skip


class Maker:
    """Makes opcodes that push one value each, and remembers what is in the memo."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.num_memo = rng, 0

    def kept(self, code: bytes) -> bytes:
        """Let the value be used again."""
        kind = self.rng.random()
        if kind < 0.5:
            return code
        self.num_memo += 1
        if kind < 0.6:
            return code + b"p%d\n" % (self.num_memo - 1)
        return code + (put(self.num_memo - 1) if kind < 0.9 else b"\x94")

    def value(self, depth: int) -> bytes:
        rng = self.rng
        kinds = ["literal", "literal", "memo", "memo", "tensor", "number", "text", "odd"]
        if depth:
            kinds += ["list", "dict", "tuple", "call", "module", "twice", "list", "dict", "hostile"]
        made: bytes = getattr(self, rng.choice(kinds))(depth)
        return self.kept(made)

    def values(self, depth: int, least: int = 0) -> list[bytes]:
        num = least + int(self.rng.expovariate(0.5))
        return [self.value(depth - 1) for _ in range(num)]

    def literal(self, depth: int) -> bytes:
        return self.rng.choice(LITERALS)

    def memo(self, depth: int) -> bytes:
        index = self.rng.randrange(self.num_memo + 1)
        if index == self.num_memo:
            return b"N"
        return self.rng.choice([get(index), b"g%d\n" % index])

    def number(self, depth: int) -> bytes:
        return dumped(self.rng.choice(NUMBERS))

    def text(self, depth: int) -> bytes:
        return dumped(self.rng.choice(NAMES))

    def odd(self, depth: int) -> bytes:
        name = self.rng.choice(GLOBALS)
        first, _, last = name.rpartition(".")
        return self.rng.choice([name_of(name), dumped(first) + dumped(last) + b"\x93"])

    def hostile(self, depth: int) -> bytes:
        if self.rng.random() < 0.8:
            return self.literal(depth)
        make = VALUES[self.rng.choice([*VALUES])]
        self.num_memo = max(self.num_memo, 11)  # it may use so many
        return make(self.rng.choice([30, 300, 3000]), self.rng)

    def tensor(self, depth: int) -> bytes:
        rng, num_axes = self.rng, self.rng.choice([0, 1, 1, 1, 2, 3, 64])
        shape = tuple(rng.choice([1, 1, 2, 2, 0]) for _ in range(num_axes))
        stride = tuple(rng.choice([0, 0, 1, 2 if num_axes < 2 else 0]) for _ in range(num_axes))
        if rng.random() < 0.3:
            sizes = NUMBERS if rng.random() < 0.01 else SIZES
            shape = tuple(rng.choice(sizes) if not step else 1 for step in stride)
        kind = rng.choice(["FloatStorage"] * 99 + ["IntStorage", "QInt32Storage"])
        place = self.kept(storage(rng.choice("0001"), rng.choice([4] * 999 + [5]), kind))
        return tensor(shape, stride, rng.choice([0, 0, 0, 1]), place)

    def list(self, depth: int) -> bytes:
        items = self.values(depth)
        return self.rng.choice([
            b"](" + b"".join(items) + b"e", b"]" + b"".join(i + b"a" for i in items),
            b"(" + b"".join(items) + b"l", b"\x8f(" + b"".join(items) + b"\x90",
            b"(" + b"".join(items) + b"\x91",
        ])  # fmt: skip

    def dict(self, depth: int) -> bytes:
        rng = self.rng
        keys = (self.text(0) if rng.random() < 0.7 else self.value(0) for _ in range(9))
        items = [key + value for key, value in zip(keys, self.values(depth), strict=False)]
        start = rng.choice([b"}", b"}", name_of("collections.OrderedDict") + b")R", b"(d"])
        made = start + b"(" + b"".join(items) + b"u"
        if start[:1] == b"c" and rng.random() < 0.5:
            return made + DICT + dumped("_metadata") + self.value(depth - 1) + b"ub"
        return rng.choice([made, start + b"".join(item + b"s" for item in items)])

    def tuple(self, depth: int) -> bytes:
        items = self.values(depth)
        if 0 < len(items) <= 3 and self.rng.random() < 0.7:
            return b"".join(items) + bytes([0x84 + len(items)])
        return b"(" + b"".join(items) + b"t"

    def twice(self, depth: int) -> bytes:
        return self.value(depth - 1) + self.rng.choice([b"2\x86", b"22\x87", b"2\x862\x862\x86"])

    def call(self, depth: int) -> bytes:
        rng, function = self.rng, self.odd(depth)
        arguments = b"(" + b"".join(self.values(depth)) + b"t"
        made = rng.choice([
            function + arguments + b"R", function + arguments + b"\x81",
            function + arguments + b"}\x92", b"(" + function + arguments[1:-1] + b"o",
            arguments[:-1] + b"ia\nB\n", name_of("a.B") + arguments + b"R",
        ])  # fmt: skip
        if made.endswith(b"ia\nB\n") or made.startswith(b"ca\n"):
            made += rng.choice([b"", self.dict(depth) + b"b", b"(" + self.value(0) + b"e"])
        return made

    def module(self, depth: int) -> bytes:
        children = [self.text(0) + self.module(depth - 1) for _ in range(min(depth, 2))]
        parameters = [self.text(0) + self.tensor(0) for _ in range(2)]
        return self.kept(
            module(DICT + b"".join(children) + b"u", DICT + b"".join(parameters) + b"u")
        )

    def weights(self, size: int) -> bytes:
        """A dict that is weights, mostly, and large enough."""
        items = bytearray()
        while len(items) < size:
            name = self.rng.choice(["", "module.", "net."]) + f"{len(items)}"
            inside = self.value(self.rng.choice([0, 1, 3])) if self.rng.random() < 0.3 else b""
            items += dumped(name) + (inside or self.tensor(0))
        return self.kept(DICT + bytes(items) + b"u")


def make(folder: Path, size: int, rng: random.Random) -> Path:
    """Write a random pickle of about this size, in a zip, a legacy file or a folder."""
    maker = Maker(rng)
    kind = rng.random()
    if kind < 0.4:
        data = maker.weights(size)
    elif kind < 0.7:
        entries = [dumped("state_dict") + maker.weights(size // 2)]
        while sum(map(len, entries)) < size:
            entries.append(dumped(f"{len(entries)}") + maker.value(4))
        data = DICT + b"".join(entries) + b"u"
    elif kind < 0.8:
        data = maker.module(4)
    else:
        data = b"](" + b"".join(maker.value(5) for _ in range(size // 100)) + b"e"
    data = b"\x80\x04" + data + b"."
    if rng.random() < 0.1:
        at = rng.randrange(len(data))
        data = data[:at] + struct.pack("B", rng.randrange(256)) + data[at + 1 :]
    container = rng.random()
    if container < 0.8:
        return zipped(folder / "a", data, {"1": bytes(16)})
    if container < 0.9:
        return legacy(folder / "a", data, b"](" + plain(("0", "1"))[1:-1] + b"e")
    (folder / "a").mkdir(exist_ok=True)
    (folder / "a" / ".metadata").write_bytes(data)
    return folder / "a"
