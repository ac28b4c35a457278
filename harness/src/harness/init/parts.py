"""Parts of a module by their names: a submodule, or a single parameter or buffer."""

from collections.abc import Iterable, Sequence

from harness.convert.names import WRAPPERS
from harness.errors import UserError
from harness.names import did_you_mean, few


def bare(name: str) -> str:
    """A tensor's name without those of wrappers, such as that of ``torch.compile``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def check_parts(key: str, parts: Sequence[str], names: Iterable[str]) -> None:
    """Refuse parts that no tensor belongs to.

    Args:
        key: the setting that names them.
        parts: such as ``net.backbone``.
        names: of all tensors.

    Raises:
        UserError: with the nearest part that there is.
    """
    known = places(names)
    for part in parts:
        if part not in known:
            near = did_you_mean(part, known) or f" There is {few(tops(known))}."
            raise UserError(f"{key}: there is no {part}.{near}")


def places(names: Iterable[str]) -> dict[str, None]:
    """Every beginning of the names, and these themselves, in order."""
    found: dict[str, None] = {}
    for name in names:
        pieces = name.split(".")
        found |= dict.fromkeys(".".join(pieces[:depth]) for depth in range(1, len(pieces) + 1))
    return found


def tops(known: Iterable[str]) -> list[str]:
    """The parts of the first two levels."""
    return [place for place in known if place.count(".") < 2]


def typed(parts: Iterable[str]) -> str:
    """A list as it is typed in a command."""
    return f"[{','.join(parts)}]"
