"""What made a run and what became of it: by which commands, how it ended, how fast. No torch."""

import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness import repository
from harness.errors import TrainingError, UserError
from harness.files import write_durably
from harness.machine.gpus import NoDriverError, gpus
from harness.processes.leaving import AgreedExit

FILE = "record.json"
NEXT = ".next_config.yaml"  # with which a run goes on, once it trains again
# Variables that decide how numbers are rounded, or how many threads add them up.
ROUNDING = re.compile(
    "(OMP|MKL|ONEDNN|DNNL|OPENBLAS|ATEN|CUBLAS|CUDNN)_.*|(NVIDIA|TORCH)_.*(TF32|CUBLAS|CUDNN).*"
    "|PYTHONHASHSEED"
)


def read(run_dir: Path) -> dict[str, Any]:
    """Read a run's record; empty where nothing was noted, or the file is damaged."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        noted: dict[str, Any] = json.loads((run_dir / FILE).read_bytes())
        is_whole = all(isinstance(start, dict) for start in noted.get("starts", []))
        if is_whole and isinstance(noted.get("seconds", 0), (int, float)):
            return noted
    return {}


def note(run_dir: Path, **facts: Any) -> None:
    """Add plain values to a run's record; a full disk costs the run nothing."""
    with suppress(OSError):
        data = json.dumps(read(run_dir) | facts, indent=2).encode() + b"\n"
        write_durably(run_dir / FILE, data)


def note_start(run_dir: Path, **facts: Any) -> None:
    """Add plain values to the latest start of a run."""
    *before, last = read(run_dir).get("starts") or [{}]
    note(run_dir, starts=[*before, last | facts])


def begin(run_dir: Path) -> None:
    """Add a start to a run's record: by which command, on which machine, from which code.

    One that goes on has the config of this start from here on, and no results any more. Until then
    it is as it was, so that a command which is refused changes nothing of it.
    """
    if (run_dir / NEXT).exists():
        # In this order: who asks meanwhile finds no results of another config.
        (run_dir / "results.json").unlink(missing_ok=True)
        (run_dir / NEXT).replace(run_dir / "config.yaml")
    start = {"time": time.time(), **_made_by(), **repository.note(run_dir)}
    starts = [*read(run_dir).get("starts", []), start]
    note(run_dir, status=None, reason=None, commit=start["commit"], starts=starts)


@contextmanager
def recording(run_dir: Path) -> Iterator[None]:
    """Note how the block ends, and add its seconds to those of earlier starts.

    Nothing is noted where it ends before the run has begun: see ``begin``.
    """
    before, start = read(run_dir), time.monotonic()
    status, reason = "finished", None
    try:
        yield
    except BaseException as error:
        status, reason = _ending(error)
        raise
    finally:
        if len(read(run_dir).get("starts", [])) > len(before.get("starts", [])):
            seconds = round(before.get("seconds", 0.0) + time.monotonic() - start, 1)
            note(run_dir, status=status, reason=reason, seconds=seconds, ended=time.time())


def _made_by() -> dict[str, Any]:
    """The command and the machine of this process."""
    gpu_names, processor = [], platform.processor()
    with suppress(NoDriverError):
        gpu_names = [gpu.name for gpu in gpus()]
    with suppress(OSError):  # Linux alone has the CPU's name, which decides between kernels
        cpus = Path("/proc/cpuinfo").read_text(errors="replace")
        processor = next(iter(re.findall(r"^model name\s*: (.+)$", cpus, re.M)), processor)
    return {
        "command": shlex.join(sys.orig_argv),
        "started_in": os.getcwd(),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processor": processor,
        "num_cpus": os.cpu_count(),
        "gpus": gpu_names,
        "environment": {name: os.environ[name] for name in os.environ if ROUNDING.fullmatch(name)},
    }


def _ending(error: BaseException) -> tuple[str, str]:
    if isinstance(error, AgreedExit):
        return "stopped", f"by signal {int(error.code or 128) - 128}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "by Ctrl-C"
    line = str(error).strip().partition("\n")[0]
    is_told = isinstance(error, (TrainingError, UserError))
    return "failed", line if is_told else f"{type(error).__name__}: {line}"
