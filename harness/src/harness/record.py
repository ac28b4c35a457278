"""What a run was made of and what became of it: command, machine, code, packages, ending.

In: a run's folder, when a command starts, when its training starts, and when it ends. Out:
``record.json`` there, and a diff of what is not committed, for ``git apply``.
"""

import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import untrusted
from harness.errors import TrainingError, UserError
from harness.files import json_text, write_durably

FILE = "record.json"
PENDING_CONFIG = ".pending_config.yaml"  # the config of a resumed run, until it trains again
# Packages whose versions must be those of the training, by the names that pip shows.
MAIN_PACKAGES = ("Python", "torch", "pytorch-lightning", "torchmetrics", "numpy")
GIT_SECONDS = 5  # on a slow disk no diff is written
MAX_DIFF_BYTES = 2**24
# Options in full, because a user's settings of git can make a diff that git cannot apply.
DIFF = (
    *("diff", "HEAD", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=dirty"),
)
log = logging.getLogger(__name__)


def read(run_dir: Path) -> dict[str, Any]:
    """Read a run's record; empty if there is none, or the file is damaged."""
    with suppress(OSError, ValueError):
        return checked(run_dir / FILE)
    return {}


def checked(path: Path) -> dict[str, Any]:
    """Read a record; an OSError or a ValueError if it is none."""
    noted = untrusted.read_json(path)
    starts = noted.get("starts", []) if isinstance(noted, dict) else None
    is_list = isinstance(starts, list) and all(isinstance(start, dict) for start in starts)
    versions = [start.get("packages", {}) for start in starts or ()] if is_list else []
    is_dict = all(isinstance(one, dict) and {*map(type, one.values())} <= {str} for one in versions)
    if not (is_list and is_dict):
        raise ValueError(f"{path.name} is no record of a run")
    return noted  # type: ignore[no-any-return]


def note(run_dir: Path, **facts: Any) -> None:
    """Add plain values to a run's record; a full disk does not stop the run."""
    with suppress(OSError):
        data = json_text(read(run_dir) | facts, indent=2).encode() + b"\n"
        write_durably(run_dir / FILE, data)


def begin(run_dir: Path) -> None:
    """Add a start to a run's record: the command, the machine, the code.

    A resumed run takes its new config here, and loses its old results. Until then its folder is
    unchanged, so that a command that is refused does no harm.
    """
    if (run_dir / PENDING_CONFIG).exists():
        # In this order: nobody who reads meanwhile finds the results of another config.
        (run_dir / "results.json").unlink(missing_ok=True)
        (run_dir / PENDING_CONFIG).replace(run_dir / "config.yaml")
    state, diff = code()
    try:
        if diff:  # starts with equal changes share a file
            write_durably(run_dir / state["diff"], diff)
    except OSError as error:  # a full disk does not stop the run
        state |= {"diff": None, "no_diff": str(error.strerror or error)}
    start = {
        "time": time.time(),
        "command": shlex.join(sys.orig_argv),
        "started_in": os.getcwd(),
        "host": platform.node(),
        "num_cpus": os.cpu_count(),
        **state,
    }
    starts = [*read(run_dir).get("starts", []), start]
    note(run_dir, status=None, reason=None, commit=state["commit"], starts=starts)


def note_training(run_dir: Path, trainer: Any, *_: Any) -> None:
    """Add to the latest start, as its training begins, what decides how sums are rounded."""
    import torch  # a command begins without it

    if not trainer.is_global_zero:
        return
    if (run_dir / PENDING_CONFIG).exists():
        begin(run_dir)  # a resumed run, which nothing has refused
    num_gpus = torch.cuda.device_count() if trainer.strategy.root_device.type == "cuda" else 0
    facts = {
        "packages": packages(),
        "num_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(num_gpus)],
        "strategy": type(trainer.strategy).__name__,
        "num_processes": trainer.world_size,
        "num_devices": trainer.num_devices,
    }
    *before, last = read(run_dir).get("starts") or [{}]
    note(run_dir, starts=[*before, last | facts])
    if reason := last.get("no_diff"):
        log.warning("What is not committed was not kept: %s.", reason)


@contextmanager
def recording(run_dir: Path) -> Iterator[None]:
    """Note how the block ends, if the run has begun, and add its seconds to those before."""
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


def _ending(error: BaseException) -> tuple[str, str]:
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return "stopped", f"by signal {error.code - 128}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "by Ctrl-C"
    line = str(error).strip().partition("\n")[0]
    is_explained = isinstance(error, (TrainingError, UserError))
    return "failed", line if is_explained else f"{type(error).__name__}: {line}"


def packages() -> dict[str, str]:
    """Return the versions of Python and of all installed packages."""
    # By names of folders: opening the metadata of each would take a tenth of a second.
    folders = [path for place in reversed(sys.path) for path in Path(place).glob("*-*.dist-info")]
    pairs = [folder.name.removesuffix(".dist-info").split("-", 1) for folder in folders]
    versions = {name.replace("_", "-").lower(): version for name, version in pairs}
    return {"Python": platform.python_version(), **dict(sorted(versions.items()))}


def code() -> tuple[dict[str, Any], bytes]:
    """Ask git for ``commit``, ``repository``, and ``diff``, a file of what is not committed.

    ``no_diff`` says why that is unknown. Without a repository there is no commit. The bytes are the
    file's contents.
    """
    try:
        answer = git("rev-parse", "--show-toplevel", "HEAD", "--git-path", "index")
    except UserError:
        return {"commit": None}, b""
    top, commit, index = os.fsdecode(answer).splitlines()
    state: dict[str, Any] = {"commit": commit, "repository": top, "diff": None}
    # A diff shows new files that an index has: this one is a copy, and the user's stays as it is.
    try:
        with TemporaryDirectory() as folder:
            own = {"GIT_INDEX_FILE": str(shutil.copy2(Path(index).absolute(), folder))}
            with suppress(UserError):  # no Python file
                git("add", "-N", "--", "*.py", folder=top, environment=own)
            diff = git(*DIFF, folder=top, environment=own)
        if len(diff) > MAX_DIFF_BYTES:
            raise UserError(f"it is larger than {MAX_DIFF_BYTES >> 20} MiB")
    except (UserError, OSError) as error:
        return state | {"no_diff": str(error)}, b""
    return state | {"diff": f"uncommitted_{zlib.crc32(diff):08x}.diff" if diff else None}, diff


def git(
    *words: str,
    folder: str | Path = ".",
    environment: dict[str, str] | None = None,
    seconds: float | None = GIT_SECONDS,
) -> bytes:
    """Run git and return its output; a UserError if there is none, or it fails or is slow."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    variables = os.environ | (environment or {})
    try:
        return subprocess.run(
            command, env=variables, capture_output=True, timeout=seconds, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = os.fsdecode(getattr(error, "stderr", None) or str(error)).strip()
        raise UserError(f"git {words[0]} failed in {folder}: {reason}") from error


def changes(run_dir: Path) -> str | None:
    """Describe how code and packages differ from those of a run's last training, in one line."""
    starts = [s for s in read(run_dir).get("starts", []) if {"packages", "commit"} <= s.keys()]
    if not starts:
        return None
    before, now, installed = starts[-1], code()[0], packages()
    # Builds, as in "2.9+cpu", do not count.
    pairs = [
        (n, *(v.get(n, "none") for v in (before["packages"], installed))) for n in MAIN_PACKAGES
    ]
    changed = [f"{name} {a} -> {b}" for name, a, b in pairs if a.split("+")[0] != b.split("+")[0]]
    if before["commit"] != now["commit"]:
        changed.append(f"commit {before['commit']} -> {now['commit']}")
    if before.get("diff") != now.get("diff"):
        changed.append(f"what is not committed (then {before.get('diff') or 'nothing'})")
    what = f"Since the run was trained {', '.join(changed)} changed."
    return f"{what} Today's code and packages are used." if changed else None
