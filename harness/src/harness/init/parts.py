"""Names of a module's parts: a submodule, or a single parameter or buffer."""

from collections.abc import Iterable

from harness.convert.names import WRAPPERS
from harness.errors import UserError
from harness.names import did_you_mean, few


def bare(name: str) -> str:
    """Return a tensor's name without those of wrappers, such as that of ``torch.compile``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def prefixes(names: Iterable[str]) -> dict[str, None]:
    """Return the names and all parts that they are in, outer ones first, each once."""
    parts: dict[str, None] = {}
    for name in names:
        pieces = name.split(".")
        parts |= dict.fromkeys(".".join(pieces[:depth]) for depth in range(1, len(pieces) + 1))
    return parts


def check_parts(setting: str, parts: Iterable[str], names: Iterable[str]) -> None:
    """Refuse a setting that names parts to which none of the names of tensors belongs.

    Raises:
        UserError: with the nearest part that there is.
    """
    existing = prefixes(names)
    for part in parts:
        if part not in existing:
            near = did_you_mean(part, existing) or f" There is {few(existing)}."
            raise UserError(f"{setting}: there is no {part}.{near}")
