"""The commit that a run is started with, and a diff of what is not committed. No torch."""

import os
import shutil
import subprocess
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.errors import UserError
from harness.files import write_durably

MOST_GIT_SECONDS = 5  # on a slow disk no diff is kept
MOST_DIFF_BYTES = 2**24
# Spelled out, as a person's settings of `git diff` may be such that nothing applies it.
DIFF = (
    *("diff", "HEAD", "--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=dirty"),
)


def note(run_dir: Path) -> dict[str, Any]:
    """Write what is not committed into a run's folder, as a file for `git apply`.

    Returns:
        ``commit``, or ``None`` without a repository or git; ``repository``; ``diff``, the file's
        name, or ``None`` where all is committed; ``no_diff``, why there is none where not.
    """
    try:
        answer = git("rev-parse", "--show-toplevel", "HEAD", "--git-path", "index")
    except UserError:
        return {"commit": None}
    top, commit, index = os.fsdecode(answer).splitlines()
    noted: dict[str, Any] = {"commit": commit, "repository": top, "diff": None}
    try:
        diff = _diff(top, Path(index).absolute())
        if len(diff) > MOST_DIFF_BYTES:
            return noted | {"no_diff": f"it is larger than {MOST_DIFF_BYTES >> 20} MiB"}
        if diff:  # starts of one run with equal changes share a file
            name = f"uncommitted_{zlib.crc32(diff):08x}.diff"
            write_durably(run_dir / name, diff)
            noted["diff"] = name
    except (UserError, OSError) as error:  # a full disk costs the run nothing
        noted["no_diff"] = str(getattr(error, "strerror", error))
    return noted


def _diff(top: str, index: Path) -> bytes:
    """What differs from the commit, with new Python files that git does not ignore."""
    names = git("ls-files", "-z", "--others", "--exclude-standard", "--", "*.py", folder=top)
    # The diff shows new files once an index has them: a copy of the owner's, which stays as it is.
    with TemporaryDirectory() as folder:
        copy = Path(folder, "index")
        shutil.copy2(index, copy)  # with its time, by which git sees quick edits
        own = {"GIT_INDEX_FILE": str(copy)}
        add = ("--literal-pathspecs", "add", "-N", "--pathspec-from-file=-", "--pathspec-file-nul")
        if names:
            git(*add, folder=top, environment=own, given=names)
        return git(*DIFF, folder=top, environment=own)


def git(
    *words: str,
    folder: str | Path = ".",
    environment: dict[str, str] | None = None,
    given: bytes = b"",
    seconds: float | None = MOST_GIT_SECONDS,
) -> bytes:
    """What git answers.

    Raises:
        UserError: without git or a repository, if it fails, or takes too long.
    """
    try:
        return subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *words],
            env=os.environ | (environment or {}),
            input=given,
            capture_output=True,
            timeout=seconds,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        reason = os.fsdecode(getattr(error, "stderr", None) or str(error)).strip()
        raise UserError(f"git {words[0]} failed in {folder}: {reason}") from error
