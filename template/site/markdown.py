"""Pieces of Markdown that GitHub and the site show alike."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, with an empty line at its end."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(text: str) -> str:
    """Return a plain text as a cell of a table: ``<run>`` and ``|`` are shown as they are."""
    pieces = re.split(r"(`+[^`]*`+)", " ".join(text.split()))
    for number in range(0, len(pieces), 2):  # outside of code
        pieces[number] = re.sub(r"[<*\[]", lambda match: "\\" + match[0], pieces[number])
    return re.sub("`{2,}", "`", "".join(pieces)).replace("|", "\\|")


def code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    return f"`{text}`".replace("|", "\\|")
