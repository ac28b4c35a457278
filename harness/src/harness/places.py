"""Where in the owner's files an exception was raised, or passed through."""

import inspect
import os
import re
import sysconfig
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import harness

HARNESS = Path(harness.__path__[0]).resolve()
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
# Data workers send their exception as a text with its traceback in it.
TEXT_STARTS = "Traceback (most recent call last):\n"
FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
MESSAGE = re.compile(r"^([\w.]+)(?:: (.*))?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Place:
    """A line of code that was being executed."""

    file: str
    line: int  # counted from 1
    function: str  # that the line belongs to
    frame: FrameType | None = None  # with the function's variables, if it was in this process

    def __str__(self) -> str:
        where = f"{shown(self.file)}:{self.line}"
        return where if self.function == "<module>" else f"{where} in {self.function}"


@dataclass(frozen=True)
class Raised:
    """An exception, in this process or in another one."""

    kind: str  # name of its class
    message: str  # on one line
    places: list[Place]  # from the outermost call to the line that raised it

    @property
    def owners(self) -> Place | None:
        """The innermost line of the owner's below the first call of the harness.

        What calls the harness is left out: it may be a script or a test.
        """
        first = next((i for i, place in enumerate(self.places) if is_harness(place.file)), 0)
        written = [place for place in self.places[first:] if is_owners(place.file)]
        return written[-1] if written else None


def raised(error: BaseException) -> Raised:
    """Read an exception; where another process's came as a text, read that."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, SyntaxError) and error.filename:
        place = Place(error.filename, error.lineno or 0, "<module>")
        return Raised(kind, one_line(error.msg), [place])
    inner = text.rpartition(TEXT_STARTS)[2] if TEXT_STARTS in text else ""
    frames = list(FRAME.finditer(inner))
    # Lines of code below a frame are indented, and the message is not.
    if frames and (match := MESSAGE.search(inner, frames[-1].end())):
        places = [Place(frame[1], int(frame[2]), frame[3]) for frame in frames]
        return Raised(match[1].rpartition(".")[2], one_line(match[2] or ""), places)
    places = [
        Place(frame.f_code.co_filename, line, frame.f_code.co_name, frame)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return Raised(kind, one_line(text), places)


def one_line(text: str) -> str:
    """A message that fits on two lines of a screen; CUDA's goes on with advice for its authors."""
    if text.startswith("CUDA error"):
        text = text.partition("\n")[0]
    words = " ".join(text.split())
    return words if len(words) <= 300 else f"{words[:300]}..."


def is_harness(file: str) -> bool:
    """Whether a file belongs to this package."""
    return HARNESS in Path(file).parents


@cache
def is_owners(file: str) -> bool:
    """Whether somebody who trains with the harness has written a file."""
    path = Path(file).resolve()
    is_library = {"site-packages", "dist-packages"} & {*path.parts}
    is_generated = any(part.startswith("torchinductor") for part in path.parts)
    is_ours = {HARNESS, STANDARD_LIBRARY} & {*path.parents}
    return not (is_library or is_generated or is_ours) and path.is_file()


def shown(file: str | Path) -> str:
    """A path as seen from the working directory, which is what a user types, if it is below."""
    path = os.path.relpath(file)
    return os.path.abspath(file) if path.startswith("..") else path


def definition(owner: Any, name: str) -> Place | None:
    """Where an object's class defines a method, or else begins; ``None`` if that is no owner's."""
    for defined in (getattr(type(owner), name, None), type(owner)):
        with suppress(OSError, TypeError):  # not there, built in, or typed into a prompt
            code: Any = inspect.unwrap(defined)  # type: ignore[arg-type]  # None raises TypeError
            file = inspect.getfile(code)
            if is_owners(file):
                return Place(file, inspect.getsourcelines(code)[1], code.__name__)
    return None
