"""Pickles whose names and modules ask for more time or memory than they have bytes."""

from .hostile_values import Maker, Random
from .opcodes import DICT, dumped, get, module, name_of, put, repeated, tensor


def names_of_modules(n: int, rng: Random) -> bytes:
    """Names of a hundred parts, of which every one may be a wrapper."""
    name = "module." * 99
    weights = b"".join(dumped(f"{name}{i}") + get(9) for i in range(n // 710 + 1))
    return b"\x80\x02" + tensor() + put(9) + b"0" + DICT + weights + b"u."


def dots(n: int, rng: Random) -> bytes:
    return b"\x80\x02" + DICT + dumped("." * min(n, 65_000)) + tensor() + b"u."


def shared_children(n: int, rng: Random) -> bytes:
    """Modules that each hold the next one twice: 2 ** 16 paths in 2 KB."""
    body = module(parameters=DICT + dumped("w") + tensor() + b"u")
    for _ in range(min(n // 100 + 1, rng.choice([16, 40, 1000]))):
        body += put(9) + b"0" + module(DICT + dumped("l") + get(9) + dumped("r") + get(9) + b"u")
    return b"\x80\x02" + body + b"."


def long_prefix(n: int, rng: Random) -> bytes:
    """A module of a long name with many parameters."""
    parameters = b"".join(dumped(f"{i:x}") + get(9) for i in range(n // 24 + 1))
    child = module(parameters=DICT + parameters + b"u")
    name = dumped("a" * min(n // 2, 60_000))
    return b"\x80\x02" + tensor() + put(9) + b"0" + module(DICT + name + child + b"u") + b"."


def endless_module(n: int, rng: Random) -> bytes:
    """A module that is its own child."""
    head = name_of("my.Module") + b")\x81" + put(9)
    state = DICT + dumped("_modules") + DICT + dumped("again") + get(9) + b"uub"
    return b"\x80\x02" + head + state + b"."


def one_tensor(n: int, rng: Random) -> bytes:
    """Many names of one tensor, perhaps of many axes."""
    num_axes = rng.choice([1, 64])
    head = tensor((1,) * num_axes, (1,) * num_axes) + put(9) + b"0"
    names = b"".join(b"\x8c\x05%05x" % i + get(9) for i in range(n // 8))
    return b"\x80\x04" + head + DICT + names + b"u."


def averages(n: int, rng: Random) -> bytes:
    """Weights, and all the averages of them that there may be, as one object."""
    names = b"".join(dumped(f"{i:x}") + get(9) for i in range(n // 12 + 1))
    head = tensor() + put(9) + b"0" + DICT + names + b"u" + put(8) + b"0" + DICT
    keys = ("state_dict", "state_dict_ema", "ema_state_dict", "model_ema", "ema_model", "ema")
    return b"\x80\x02" + head + b"".join(dumped(key) + get(8) for key in keys) + b"u."


PICKLES: dict[str, Maker] = {
    "names_of_modules": names_of_modules,
    "dots": dots,
    "shared_children": shared_children,
    "long_prefix": long_prefix,
    "endless_module": endless_module,
    "one_tensor": one_tensor,
    "averages": averages,
    "frames": lambda n, _: b"\x80\x04" + repeated(b"\x95" + b"\xff" * 7 + b"\0", n) + b"N.",
}
