from dataclasses import dataclass, field
from typing import Any


@dataclass
class Problem:
    """Something that is broken, and what to do about it."""

    what: str
    remedy: str


@dataclass
class Section:
    """One thing that was looked at.

    Attributes:
        name: of the thing; its key for a program, with underscores.
        text: what a person reads; lines.
        values: what a program reads.
        problems: what is broken.
    """

    name: str
    text: str
    values: Any = None
    problems: list[Problem] = field(default_factory=list)
