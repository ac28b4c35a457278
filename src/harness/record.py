"""What made a run and what became of it: by which commands, how it ended, how fast. No torch."""

import json
import os
import platform
import re
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
DIFF = "uncommitted.diff"  # beside the record, for `git apply`
MOST_DIFF_BYTES = 2**24
# Variables that decide how numbers are rounded, or how many threads add them up.
ROUNDING = re.compile(
    "(OMP|MKL|ONEDNN|DNNL|OPENBLAS|ATEN|CUBLAS|CUDNN)_.*|(NVIDIA|TORCH)_.*(TF32|CUBLAS|CUDNN).*"
    "|PYTHONHASHSEED"
)


def read(run_dir: Path) -> dict[str, Any]:
    """What was noted; empty where nothing was, or what was is damaged."""
    with suppress(OSError, ValueError):
        found = json.loads((run_dir / FILE).read_bytes())
        starts = found.get("starts", []) if isinstance(found, dict) else None
        is_list = isinstance(starts, list) and all(isinstance(one, dict) for one in starts)
        if is_list and isinstance(found.get("seconds", 0), (int, float)):
            return dict(found)
    return {}


def note(run_dir: Path, **facts: Any) -> None:
    """Add plain values to a run's record; a full disk costs the run nothing."""
    with suppress(OSError):
        data = json.dumps(read(run_dir) | facts, indent=2).encode() + b"\n"
        write_durably(run_dir / FILE, data)


def note_start(run_dir: Path, **facts: Any) -> None:
    """Add plain values to what is known of a run's latest start."""
    *before, last = read(run_dir).get("starts") or [{}]
    note(run_dir, starts=[*before, last | facts])


@contextmanager
def recording(run_dir: Path) -> Iterator[None]:
    """Note what starts the block and how it ends; add its seconds to those of earlier starts."""
    known = read(run_dir)
    before, start, commit = known.get("seconds", 0.0), time.monotonic(), checked_out()
    begun = {"time": time.time(), **made_by(), "commit": commit, "is_dirty": is_dirty()}
    starts = [*known.get("starts", []), begun]
    note(run_dir, status=None, reason=None, commit=commit, starts=starts)
    keep_diff(run_dir, begun["is_dirty"])
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
        "processor": processor(),
        "num_cpus": os.cpu_count(),
        "gpus": gpus,
        "environment": {name: os.environ[name] for name in os.environ if ROUNDING.fullmatch(name)},
    }


def processor() -> str:
    """The name of the CPU, which decides between kernels; Linux alone has it in a file."""
    with suppress(OSError, ValueError):
        if found := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M):
            return found[1]
    return platform.processor()


def is_dirty() -> bool | None:
    """Whether files that git knows differ from what is checked out; ``None`` where unknown.

    The sources that a run has imported are kept beside it, whether git knows them or not.
    """
    found = git("status", "--porcelain", "--untracked-files=no")
    return None if found is None else bool(found)


def keep_diff(run_dir: Path, is_dirty: bool | None) -> None:
    """Write what differs from the commit, of files that git knows; nothing where that is too much.

    Args:
        run_dir: of the run, which may have the differences of an earlier start.
        is_dirty: whether there are any.
    """
    # Spelled out, as a person's settings of `git diff` may be such that nothing applies it.
    options = "--binary --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/"
    found = git("diff", "HEAD", *options.split()) if is_dirty else None
    with suppress(OSError):
        (run_dir / DIFF).unlink(missing_ok=True)
        if found and len(found) <= MOST_DIFF_BYTES:
            write_durably(run_dir / DIFF, found)


def git(*words: str, seconds: float = MOST_GIT_SECONDS) -> bytes | None:
    """What git answers; ``None`` without git or a repository, or where it takes too long."""
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _ending(error: BaseException) -> tuple[str, str]:
    if isinstance(error, AgreedExit):
        return "stopped", f"by signal {int(error.code or 128) - 128}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "by Ctrl-C"
    if isinstance(error, (TrainingError, UserError)):
        return "failed", str(error).partition("\n")[0]
    text = str(error).strip().partition("\n")[0]
    return "failed", f"{type(error).__name__}: {text}"
