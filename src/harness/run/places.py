"""Where in the owner's files an exception was raised, or passed through."""

import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

HARNESS = Path(__file__).resolve().parents[1]
LIBRARIES = {
    Path(folder).resolve()
    for name, folder in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
}
# Data workers and spawned processes send their exception as a text with its traceback in it.
TEXT_STARTS = "Traceback (most recent call last):\n"
FRAME_LINE = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$')


@dataclass(frozen=True)
class Place:
    """A line of code that was being executed.

    Args:
        file: its path.
        line: counted from 1.
        function: the name of the function that the line belongs to.
        frame: with the function's variables; ``None`` if that was in another process.
    """

    file: str
    line: int
    function: str
    frame: FrameType | None = None

    def __str__(self) -> str:
        where = f"{shown(self.file)}:{self.line}"
        return where if self.function == "<module>" else f"{where} in {self.function}"


@dataclass(frozen=True)
class Raised:
    """An exception, in this process or in another one.

    Args:
        kind: name of its class.
        message: its text, on one line.
        places: from the outermost call to the line that raised it.
    """

    kind: str
    message: str
    places: list[Place]

    @property
    def owners(self) -> Place | None:
        """The innermost line that the owner has written.

        What calls the harness is left out: it may be a script or a test.
        """
        ours = [i for i, place in enumerate(self.places) if is_harness(place.file)]
        theirs = [place for place in self.places[min(ours, default=0) :] if is_owners(place.file)]
        return theirs[-1] if theirs else None


def raised(error: BaseException, in_words: bool = True) -> Raised:
    """Read an exception; where another process's came as a text, read that unless told not to."""
    if isinstance(error, SyntaxError) and error.filename:
        place = Place(error.filename, error.lineno or 0, "<module>")
        return Raised(type(error).__name__, one_line(error.msg), [place])
    text = str(error)
    if in_words and TEXT_STARTS in text and (found := _read(text.rpartition(TEXT_STARTS)[2])):
        return found
    places = [
        Place(frame.f_code.co_filename, line, frame.f_code.co_name, frame)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return Raised(type(error).__name__, one_line(text), places)


def _read(text: str) -> Raised | None:
    places: list[Place] = []
    said: list[str] = []
    for line in text.rstrip().splitlines():
        if frame := FRAME_LINE.match(line):
            places.append(Place(frame[1], int(frame[2]), frame[3]))
            said = []
        elif places and (said or not line.startswith(" ")):
            said.append(line)
    kind, _, message = "\n".join(said).partition(":")
    if not kind:
        return None
    return Raised(kind.rpartition(".")[2], one_line(message), places)


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
    is_library = {"site-packages", "dist-packages"} & set(path.parts) or LIBRARIES & {*path.parents}
    is_generated = any(part.startswith("torchinductor") for part in path.parts)
    return path.is_file() and not is_library and not is_generated and not is_harness(str(path))


def shown(file: str) -> str:
    """A path as seen from the working directory, if it is below that."""
    path = os.path.relpath(file)
    return os.path.abspath(file) if path.startswith("..") else path


def definition(owner: Any, name: str) -> Place | None:
    """Where an object's class defines a method, or else begins; ``None`` if that is no owner's."""
    method: Any = getattr(type(owner), name, None)
    code = getattr(inspect.unwrap(method), "__code__", None) if method else None
    if code is not None and is_owners(code.co_filename):
        return Place(code.co_filename, code.co_firstlineno, name)
    try:
        file, line = inspect.getfile(type(owner)), inspect.getsourcelines(type(owner))[1]
    except (OSError, TypeError):  # built in, or typed into a prompt
        return None
    return Place(file, line, type(owner).__name__) if is_owners(file) else None


def variables(places: list[Place]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions that were being executed with their variables, the innermost first."""
    for place in reversed(places):
        if place.frame is not None:
            yield place.function, place.frame.f_locals
