"""What became of a run: how long it was computed, how it ended, how fast it was. No torch."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.code_version import checked_out
from harness.errors import TrainingError, UserError
from harness.files import write_durably
from harness.processes.leaving import AgreedExit

FILE = "record.json"


def read(run_dir: Path) -> dict[str, Any]:
    """What was noted; empty where nothing was, or what was is damaged."""
    with suppress(OSError, ValueError):
        found = json.loads((run_dir / FILE).read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def note(run_dir: Path, **facts: Any) -> None:
    """Add plain values to a run's record; a full disk costs the run nothing."""
    with suppress(OSError):
        data = json.dumps(read(run_dir) | facts, indent=2).encode() + b"\n"
        write_durably(run_dir / FILE, data)


@contextmanager
def recording(run_dir: Path) -> Iterator[None]:
    """Note how the block ends, and add its seconds to those of earlier starts."""
    before = read(run_dir).get("seconds", 0.0)
    start = time.monotonic()
    note(run_dir, status=None, reason=None, commit=checked_out())
    status, reason = "finished", None
    try:
        yield
    except BaseException as error:
        status, reason = _ending(error)
        raise
    finally:
        seconds = round(before + time.monotonic() - start, 1)
        note(run_dir, status=status, reason=reason, seconds=seconds, ended=time.time())


def _ending(error: BaseException) -> tuple[str, str]:
    if isinstance(error, AgreedExit):
        return "stopped", f"by signal {int(error.code or 128) - 128}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "by Ctrl-C"
    if isinstance(error, (TrainingError, UserError)):
        return "failed", str(error).partition("\n")[0]
    text = str(error).strip().partition("\n")[0]
    return "failed", f"{type(error).__name__}: {text}"
