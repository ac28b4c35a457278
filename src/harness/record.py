"""What made a run and what became of it: by which commands, how it ended, how fast. No torch."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.code_version import checked_out
from harness.errors import TrainingError, UserError
from harness.files import write_durably
from harness.machine import nvml
from harness.processes.leaving import AgreedExit

FILE = "record.json"
MOST_GIT_SECONDS = 5  # on a slow disk it stays unknown whether files were changed


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
    """Note what starts the block and how it ends; add its seconds to those of earlier starts."""
    known = read(run_dir)
    before, start, commit = known.get("seconds", 0.0), time.monotonic(), checked_out()
    begun = {"time": time.time(), **made_by(), "commit": commit, "is_dirty": is_dirty()}
    starts = [*known.get("starts", []), begun]
    note(run_dir, status=None, reason=None, commit=commit, starts=starts)
    status, reason = "finished", None
    try:
        yield
    except BaseException as error:
        status, reason = _ending(error)
        raise
    finally:
        seconds = round(before + time.monotonic() - start, 1)
        note(run_dir, status=status, reason=reason, seconds=seconds, ended=time.time())


def made_by() -> dict[str, Any]:
    """The command and the machine of this process."""
    try:
        gpus = [gpu.name for gpu in nvml.gpus()]
    except nvml.NoDriverError:
        gpus = []
    return {
        "command": shlex.join(sys.orig_argv),
        "started_in": os.getcwd(),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "num_cpus": os.cpu_count(),
        "gpus": gpus,
    }


def is_dirty() -> bool | None:
    """Whether files that git knows differ from what is checked out; ``None`` where unknown.

    The sources that a run has imported are kept beside it, whether git knows them or not.
    """
    command = ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=MOST_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or it takes too long
        return None
    return bool(done.stdout)


def _ending(error: BaseException) -> tuple[str, str]:
    if isinstance(error, AgreedExit):
        return "stopped", f"by signal {int(error.code or 128) - 128}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "by Ctrl-C"
    if isinstance(error, (TrainingError, UserError)):
        return "failed", str(error).partition("\n")[0]
    text = str(error).strip().partition("\n")[0]
    return "failed", f"{type(error).__name__}: {text}"
