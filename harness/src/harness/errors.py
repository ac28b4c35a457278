"""The exceptions that end a command without a traceback, and texts that are safe to print."""

import io
import os
import sys
from typing import Any, TextIO


def printable(text: str, keep: str = "") -> str:
    """Return a text with what a terminal would obey, also line breaks, escaped; but for `keep`."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


class Unbroken(io.FileIO):
    """A pipe whose reader may end before the writer does: what is written later is dropped."""

    def write(self, data: Any) -> int:
        """Write, or drop what nobody reads."""
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_readers() -> None:
    """Go on when the reader of stdout or stderr ends, as that of ``train.py | head`` does."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stream is not None and not stream.isatty():
            stream.flush()
            raw = io.BufferedWriter(Unbroken(stream.fileno(), "w", closefd=False))
            is_eager = name == "stderr"
            how = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": is_eager}
            setattr(sys, name, io.TextIOWrapper(raw, **how))


def print_text(text: str, file: TextIO | None = None) -> None:
    """Print lines that may quote a stranger's file: names, notes, settings, keys."""
    print(printable(text, keep="\n"), file=file, flush=True)


class UserError(Exception):
    """A mistake in a command, a YAML file or an environment, which the user can correct.

    The entry points print its message and exit with status 1. The message says what was set, what
    it clashes with, and what to type instead.
    """

    def __str__(self) -> str:
        """Return the message, without the traceback that a data worker's error begins with."""
        said = super().__str__().rpartition("harness.errors.UserError: ")[2].rstrip()
        return printable(said, keep="\n")  # it may quote a stranger's file


class TrainingError(Exception):
    """A state of a training that must not go on, and that no command could have shown before.

    The process that finds it logs the message; the entry points exit with status 1.
    """


class AgreedExit(SystemExit):
    """Raised in every process of a run at the same step, so that none waits for another."""
