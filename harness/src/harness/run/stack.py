"""Read an exception: its message on one line, and the lines of code that it passed through.

In: an exception of this process, or a data worker's, which arrives as text. Out: an ``ErrorInfo``.
Next: ``mistakes`` shows the innermost line of the user.
"""

import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import harness
from harness.names import shown

HARNESS = Path(harness.__path__[0]).resolve()
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
MAX_LENGTH = 300  # characters of a message, two lines of a screen
# The traceback in the text of a data worker's exception.
TEXT_STARTS = "Traceback (most recent call last):\n"
FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
MESSAGE = re.compile(r"^([\w.]+)(?:: (.*))?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CodeLine:
    """A line of code that was being executed."""

    file: str
    line: int  # counted from 1
    function: str
    frame: FrameType | None = None  # with the function's variables, in this process

    def __str__(self) -> str:
        where = f"{shown(self.file)}:{self.line}"
        return where if self.function == "<module>" else f"{where} in {self.function}"

    @property
    def is_harness(self) -> bool:
        """Whether it belongs to this package."""
        return HARNESS in Path(self.file).parents

    @property
    def is_users(self) -> bool:
        """Whether it belongs neither to a library, nor to the harness, nor to compiled code."""
        path = Path(self.file).resolve()
        is_library = any(p.endswith("-packages") or "torchinductor" in p for p in path.parts)
        return not (is_library or {HARNESS, STANDARD_LIBRARY} & {*path.parents}) and path.is_file()


@dataclass(frozen=True)
class ErrorInfo:
    """What an exception says and where it was raised."""

    kind: str  # name of its class
    message: str  # on one line
    lines: list[CodeLine]  # from the outermost call to the line that raised it

    @property
    def user_line(self) -> CodeLine | None:
        """The user's innermost line below the first call of the harness.

        A program or a test that calls the harness is not to blame.
        """
        first = next((i for i, line in enumerate(self.lines) if line.is_harness), 0)
        return next((line for line in reversed(self.lines[first:]) if line.is_users), None)


def read_error(error: BaseException) -> ErrorInfo:
    """Read an exception; if it carries the text of a data worker's, read that."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, SyntaxError) and error.filename:
        line = CodeLine(error.filename, error.lineno or 0, "<module>")
        return ErrorInfo(kind, one_line(error.msg), [line])
    inner = text.rpartition(TEXT_STARTS)[2] if TEXT_STARTS in text else ""
    frames = list(FRAME.finditer(inner))
    # Lines of code below a frame are indented, and the message is not.
    if frames and (match := MESSAGE.search(inner, frames[-1].end())):
        lines = [CodeLine(frame[1], int(frame[2]), frame[3]) for frame in frames]
        return ErrorInfo(match[1].rpartition(".")[2], one_line(match[2] or ""), lines)
    lines = [
        CodeLine(frame.f_code.co_filename, number, frame.f_code.co_name, frame)
        for frame, number in traceback.walk_tb(error.__traceback__)
    ]
    return ErrorInfo(kind, one_line(text), lines)


def one_line(text: str) -> str:
    """Shorten a message to two lines of a screen; CUDA's has advice below its first line."""
    if text.startswith("CUDA error"):
        text = text.partition("\n")[0]
    words = " ".join(text.split())
    return words if len(words) <= MAX_LENGTH else f"{words[:MAX_LENGTH]}..."
