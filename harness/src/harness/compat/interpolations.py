"""Limit the number and size of a config's interpolations.

With ``a: ${b}${b}``, ``b: ${c}${c}`` and so on, each line doubles the work: a YAML file of 500
bytes would take hours to resolve. OmegaConf has no limit, and no hook for one. Without this file
``tests/command/test_trust.py`` hangs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf.base import Container

from harness.errors import UserError

MAX_NUM = 10_000  # interpolations per command; the template's configs have 30
MAX_TEXT = 2**24  # characters of the values of all interpolations
MAX_DEPTH = 20  # of nested interpolations


@contextmanager
def bounded() -> Iterator[None]:
    """Limit the interpolations that are resolved in this context.

    Raises:
        UserError: at the end of the context, if the interpolations exceed a limit.
    """
    original, num, text, depth = Container.resolve_parse_tree, 0, 0, 0

    def resolve(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num, text, depth
        num, depth = num + 1 + MAX_NUM * (depth >= MAX_DEPTH), depth + 1
        try:
            value = original(self, *args, **kwargs) if num <= MAX_NUM and text <= MAX_TEXT else None
        finally:
            depth -= 1
        text += len(value) if isinstance(value, str) else 0
        return value

    Container.resolve_parse_tree = resolve  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container.resolve_parse_tree = original  # type: ignore[method-assign]
    if num > MAX_NUM or text > MAX_TEXT:
        raise UserError(
            f"The config's interpolations (${{...}}) exceed a limit: {MAX_NUM:,} in number, "
            f"{MAX_TEXT >> 20} MiB of text,\nor {MAX_DEPTH} nested. Write the values out, or "
            "remove the YAML file that has them."
        )
