import io
import logging
import sys
from typing import Any

log = logging.getLogger(__name__)


class Screen(io.FileIO):
    """A screen whose end costs a run nothing: what cannot be shown is left out.

    ``train.py | head`` closes it, so does the end of a terminal; a file that stands for it may be
    on a full disk, which can have room again.
    """

    has_failed = False

    def write(self, data: Any) -> int:
        """Show bytes, or leave them out; the first time the run's log says so."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if not self.has_failed:
                self.has_failed = True
                log.info("The run goes on without its screen: %s.", error.strerror)
            return len(data)


def outlive_screen() -> None:
    """Let this process go on where nobody reads what it prints."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # there is none, or it is a test's or a notebook's
        stream.flush()
        screen = io.TextIOWrapper(
            io.BufferedWriter(Screen(stream.fileno(), "w", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, screen)
