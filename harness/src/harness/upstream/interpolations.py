"""Bound what the interpolations of a config cost.

``a: ${b}${b}`` of ``b: ${c}${c}`` and so on doubles with each line, and OmegaConf follows them to
the end: a YAML file of 500 bytes would take hours. It has no limit and no hook for one. Without
this file ``tests/command/test_trust.py`` waits for ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf.base import Container

from harness.errors import UserError

MAX_NUM = 10_000  # interpolations that a command resolves; the template's configs have 30
MAX_TEXT = 2**24  # characters of what they stand for
MAX_DEPTH = 20  # of interpolations in what another one stands for


@contextmanager
def bounded() -> Iterator[None]:
    """Let a block resolve so many interpolations and no more.

    Raises:
        UserError: it would resolve more.
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
            f"The config has more than {MAX_NUM:,} interpolations with those that they stand for, "
            f"more than {MAX_TEXT >> 20} MiB,\nor {MAX_DEPTH} that stand for each other. Write the "
            "values out, or leave out the YAML file that has them."
        )
