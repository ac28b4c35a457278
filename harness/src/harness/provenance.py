"""The record of a run: its commands, machine, code, packages, and how it ended.

In: a run's folder, at the start of a command, at the start of its training, and at the end. Out:
``record.json`` in that folder, and a diff of the uncommitted changes, for ``git apply``.
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
# The run warns if these packages have other versions than in the training; names as pip shows them.
MAIN_PACKAGES = ("Python", "torch", "pytorch-lightning", "torchmetrics", "numpy")
GIT_SECONDS = 5  # git must answer in this time; otherwise no diff is written
MAX_DIFF_BYTES = 2**24
# All options are set, because with a user's git config, git may write a diff that it cannot apply.
DIFF = (
    *("diff", "HEAD", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=dirty"),
)
log = logging.getLogger(__name__)


def read(run_dir: Path) -> dict[str, Any]:
    """Return a run's record, or ``{}`` if there is none or it is damaged."""
    with suppress(OSError, ValueError):
        return checked(run_dir / FILE)
    return {}


def checked(path: Path) -> dict[str, Any]:
    """Return the record in a file; raise an OSError or a ValueError if there is no valid one."""
    content = untrusted.read_json(path)
    starts = content.get("starts", []) if isinstance(content, dict) else None
    is_list = isinstance(starts, list) and all(isinstance(start, dict) for start in starts)
    versions = [start.get("packages", {}) for start in starts or ()] if is_list else []
    is_dict = all(isinstance(v, dict) and {*map(type, v.values())} <= {str} for v in versions)
    if not (is_list and is_dict):
        raise ValueError(f"{path.name} is not a record of a run")
    return content  # type: ignore[no-any-return]


def note(run_dir: Path, **facts: Any) -> None:
    """Add JSON values to a run's record; a full disk does not stop the run."""
    with suppress(OSError):
        data = json_text(read(run_dir) | facts, indent=2).encode() + b"\n"
        write_durably(run_dir / FILE, data)


def begin(run_dir: Path) -> None:
    """Add a start to a run's record: the command, the machine, the code.

    A resumed run gets its new config here, and loses its old results. Until then its folder stays
    unchanged, so a command that stops with an error changes nothing.
    """
    if (run_dir / PENDING_CONFIG).exists():
        # In this order, the folder never has the results of one config beside another config.
        (run_dir / "results.json").unlink(missing_ok=True)
        (run_dir / PENDING_CONFIG).replace(run_dir / "config.yaml")
    state, diff = code()
    try:
        if diff:  # equal diffs have equal names, so several starts may use one file
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
    """Add what affects rounding errors (devices, threads, versions) to the latest start.

    Called when the training begins.
    """
    import torch  # imported here, because a command starts without torch

    if not trainer.is_global_zero:
        return
    if (run_dir / PENDING_CONFIG).exists():
        begin(run_dir)  # a resumed run, which has passed all checks
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
        log.warning("This run cannot be reproduced: no diff of its code was saved (%s).", reason)


@contextmanager
def recording(run_dir: Path) -> Iterator[None]:
    """Record how the block ends and its duration, if the run has begun within the block."""
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
    """Return the status of a run that an exception ended, and the reason."""
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return "stopped", f"by signal {error.code - 128}"
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "by Ctrl-C"
    line = str(error).strip().partition("\n")[0]
    is_explained = isinstance(error, (TrainingError, UserError))
    return "failed", line if is_explained else f"{type(error).__name__}: {line}"


def packages() -> dict[str, str]:
    """Return the versions of Python and of all installed packages."""
    # From the names of folders: reading the metadata of all packages would take 0.1 seconds.
    folders = [path for entry in reversed(sys.path) for path in Path(entry).glob("*-*.dist-info")]
    pairs = [folder.name.removesuffix(".dist-info").split("-", 1) for folder in folders]
    versions = {name.replace("_", "-").lower(): version for name, version in pairs}
    return {"Python": platform.python_version(), **dict(sorted(versions.items()))}


def code() -> tuple[dict[str, Any], bytes]:
    """Return the state of the git repository, and a diff of the uncommitted changes.

    Returns:
        A dict and the contents of the diff. The dict has ``commit`` (``None`` without a
        repository), ``repository``, ``diff`` (the file name for the diff), and, if there is no
        diff because git failed, the reason as ``no_diff``.
    """
    try:
        output = git("rev-parse", "--show-toplevel", "HEAD", "--git-path", "index")
    except UserError:
        return {"commit": None}, b""
    top, commit, index = os.fsdecode(output).splitlines()
    state: dict[str, Any] = {"commit": commit, "repository": top, "diff": None}
    # New files are in a diff only if they are in the index: use a copy of the user's index.
    try:
        with TemporaryDirectory() as folder:
            copied = {"GIT_INDEX_FILE": str(shutil.copy2(Path(index).absolute(), folder))}
            with suppress(UserError):  # there is no Python file
                git("add", "-N", "--", "*.py", folder=top, environment=copied)
            diff = git(*DIFF, folder=top, environment=copied)
        if len(diff) > MAX_DIFF_BYTES:
            raise UserError(f"it is larger than {MAX_DIFF_BYTES >> 20} MiB")
    except (UserError, OSError) as error:
        return state | {"no_diff": str(error)}, b""
    return state | {"diff": f"uncommitted_{zlib.crc32(diff):08x}.diff" if diff else None}, diff


def git(
    *arguments: str,
    folder: str | Path = ".",
    environment: dict[str, str] | None = None,
    seconds: float | None = GIT_SECONDS,
) -> bytes:
    """Return the output of a git command.

    Raises:
        UserError: if git is not installed, fails, or takes longer than ``seconds``.
    """
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    variables = os.environ | (environment or {})
    try:
        return subprocess.run(
            command, env=variables, capture_output=True, timeout=seconds, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = os.fsdecode(getattr(error, "stderr", None) or str(error)).strip()
        raise UserError(f"git {arguments[0]} failed in {folder}: {reason}") from error


def changes(run_dir: Path) -> str | None:
    """Return a line with the differences of code and packages since a run was last trained.

    Returns:
        ``None`` if they are equal, or if the run has no training on record.
    """
    starts = [s for s in read(run_dir).get("starts", []) if {"packages", "commit"} <= s.keys()]
    if not starts:
        return None
    before, now, installed = starts[-1], code()[0], packages()
    pairs = [
        (n, *(v.get(n, "none") for v in (before["packages"], installed))) for n in MAIN_PACKAGES
    ]
    # Compare versions without the build, which is "+cpu" in "2.9+cpu".
    changed = [f"{name} {a} -> {b}" for name, a, b in pairs if a.split("+")[0] != b.split("+")[0]]
    if before["commit"] != now["commit"]:
        changed.append(f"commit {before['commit']} -> {now['commit']}")
    if before.get("diff") != now.get("diff"):
        changed.append(f"uncommitted changes (then {before.get('diff') or 'none'})")
    text = f"Since the run was trained, these have changed: {', '.join(changed)}."
    return f"{text} This command uses the current code and packages." if changed else None
