"""Exceptions that end a command without a traceback, and safe printing of untrusted texts."""

import io
import os
import sys
from typing import Any, TextIO


def printable(text: str, keep: str = "") -> str:
    """Return a text with all control characters and line breaks escaped, except those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


class Unbroken(io.FileIO):
    """A pipe that drops all data after its reader has ended, and raises no BrokenPipeError."""

    def write(self, data: Any) -> int:
        """Write the data, or drop it if the reader has ended."""
        try:
            return super().write(data)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_readers() -> None:
    """Let this process continue after the reader of stdout or stderr ends: ``train.py | head``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stream is not None and not stream.isatty():
            stream.flush()
            raw = io.BufferedWriter(Unbroken(stream.fileno(), "w", closefd=False))
            wrapper = io.TextIOWrapper(
                raw, stream.encoding, stream.errors, line_buffering=name == "stderr"
            )
            setattr(sys, name, wrapper)


def print_text(text: str, file: TextIO | None = None) -> None:
    """Print a text that may quote a stranger's file; control characters are escaped."""
    print(printable(text, keep="\n"), file=file, flush=True)


class UserError(Exception):
    """A mistake in a command, a YAML file or the environment that the user can correct.

    The entry points print its message and exit with status 1. The message says what was set, what
    it clashes with, and what to type instead.
    """

    def __str__(self) -> str:
        """Return the message, without the traceback that a data worker puts before it."""
        message = super().__str__().rpartition("harness.errors.UserError: ")[2].rstrip()
        return printable(message, keep="\n")  # it may quote a stranger's file


class TrainingError(Exception):
    """An error during a training that no earlier check could find.

    The process that finds it logs the message. The entry points exit with status 1.
    """


class AgreedExit(SystemExit):
    """Raised on all ranks at the same step, so that no rank waits for another."""
