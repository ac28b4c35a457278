"""Pieces of Markdown that GitHub and the site show alike."""

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def inline(text: str) -> str:
    """Return a plain text on one line, which shows ``<run>`` and ``*`` as they are."""
    pieces = re.split(r"(`+[^`]*`+)", " ".join(text.split()))
    pieces[::2] = [re.sub(r"([<*\[])", r"\\\1", piece) for piece in pieces[::2]]
    return re.sub("`{2,}", "`", "".join(pieces))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown, with an empty line at its end."""
    lines = [[one.replace("|", "\\|") for one in row] for row in (head, ["---"] * len(head), *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def fenced(text: str, language: str = "") -> str:
    """Return a text as a block of code."""
    return f"```{language}\n{text.strip()}\n```\n"


def first_comment(path: Path) -> list[str]:
    """Return the comment at the beginning of a file, without lines that programs read."""
    head = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    return [re.sub("^# ?", "", line) for line in head if line[:3] not in ("#!/", "#SB")]
