"""The commit that a run is started with, and a diff of what is not committed. No torch."""

import os
import shutil
import subprocess
import zlib
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.errors import UserError
from harness.files import write_durably

MOST_GIT_SECONDS = 5  # on a slow disk no diff is kept
MOST_DIFF_BYTES = 2**24
UNTRACKED = ("*.py", "*.yaml")  # sources that git does not know yet, unless it ignores them
# Spelled out, as a person's settings of `git diff` may be such that nothing applies it.
OPTIONS = (
    *("--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv"),
    *("--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=dirty"),
)


def note(run_dir: Path) -> dict[str, Any]:
    """Write what is not committed into a run's folder, as a file for `git apply`.

    Returns:
        ``commit``, or ``None`` without a repository or git; ``repository``; ``diff``, the file's
        name, or ``None`` where all is committed; ``no_diff``, why there is none where not.
    """
    try:
        found = git("rev-parse", "--show-toplevel", "HEAD", "--git-path", "index")
    except UserError:
        return {"commit": None}
    top, commit, index = os.fsdecode(found).splitlines()
    noted: dict[str, Any] = {"commit": commit, "repository": top, "diff": None}
    try:
        diff = _diff(top, Path(index).absolute())
    except UserError as error:
        return noted | {"no_diff": str(error)}
    if len(diff) > MOST_DIFF_BYTES:
        return noted | {"no_diff": f"it is larger than {MOST_DIFF_BYTES >> 20} MiB"}
    if diff:
        # Starts of one run with equal changes share a file.
        noted["diff"] = f"uncommitted_{zlib.crc32(diff):08x}.diff"
        try:
            write_durably(run_dir / noted["diff"], diff)
        except OSError as error:  # a full disk costs the run nothing
            return noted | {"diff": None, "no_diff": str(error.strerror)}
    return noted


def _diff(top: str, index: Path) -> bytes:
    """What differs from the commit, with sources that git does not know yet."""
    listed = git("ls-files", "-z", "--others", "--exclude-standard", "--", *UNTRACKED, folder=top)
    names = [
        name
        for name in listed.split(b"\0")
        if name and not Path(top, os.fsdecode(name)).with_name("overrides.yaml").exists()  # a run's
    ]
    if not names:
        return git("diff", "HEAD", *OPTIONS, folder=top)
    # The diff shows new files once an index has them: a copy of the owner's, which stays as it is.
    with TemporaryDirectory() as folder:
        copy = Path(folder, "index")
        with suppress(OSError):
            shutil.copy2(index, copy)  # with its time, by which git sees quick edits
        own = {"GIT_INDEX_FILE": str(copy)}
        add = ("--literal-pathspecs", "add", "-N", "--pathspec-from-file=-", "--pathspec-file-nul")
        git(*add, folder=top, environment=own, given=b"\0".join(names))
        return git("diff", "HEAD", *OPTIONS, folder=top, environment=own)


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
    except subprocess.CalledProcessError as error:
        said = os.fsdecode(error.stderr).strip()
        raise UserError(f"git {words[0]} failed in {folder}: {said}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"git {words[0]} failed in {folder}: {error}") from error
