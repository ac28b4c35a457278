"""The files of a work tree as a dict, for programs that rewrite it. Needs git and nothing else."""

import stat
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class File(NamedTuple):
    """What a file holds, and its permissions."""

    data: bytes
    mode: int = 0o644


Files = dict[str, File]  # by path below the root, with forward slashes


def git(root: Path, *arguments: str) -> str:
    """Run git in ``root``; exit with its message where it refuses."""
    command = ["git", "-C", str(root), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{result.stderr.strip()}\nTo make {root} a repository: git init && git add -A")
    return result.stdout


def read(root: Path) -> Files:
    """Read every file that git knows or would take; what it ignores stays out."""
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    paths = [root / name for name in listed.split("\0") if name]
    return {
        path.relative_to(root).as_posix(): File(
            path.read_bytes(), stat.S_IMODE(path.stat().st_mode)
        )
        for path in paths
        if path.is_file() and not path.is_symlink()
    }


def refuse_changes(root: Path, force: bool) -> None:
    """Exit where the work tree holds changes that no commit has."""
    changed = git(root, "status", "--porcelain").splitlines()
    if changed and not force:
        shown = "\n".join(changed[:5] + ["..."] * (len(changed) > 5))
        sys.exit(f"These changes are not committed:\n{shown}\nCommit them, or add --force.")


def write(root: Path, before: Files, after: Files) -> list[str]:
    """Turn ``before`` into ``after`` file by file, and return the paths that changed.

    Folders are merged and left when empty: a folder that is renamed as a whole cannot take the
    place of one that exists.
    """
    changed = [path for path in sorted(before | after) if before.get(path) != after.get(path)]
    for path in changed:
        target = root / path
        if path in after:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(after[path].data)
            target.chmod(after[path].mode)
        else:
            target.unlink(missing_ok=True)
            _remove_empty(target.parent, root)
    return changed


def _remove_empty(folder: Path, root: Path) -> None:
    while folder != root and folder.exists():
        names = [path.name for path in folder.iterdir() if path.name != "__pycache__"]
        if names:
            return
        for cached in folder.glob("__pycache__/*"):
            cached.unlink()
        for cached in folder.glob("__pycache__"):
            cached.rmdir()
        folder.rmdir()
        folder = folder.parent


def package(files: Files) -> str:
    """The one package below ``src``."""
    found = sorted(
        {
            path.split("/")[1]
            for path in files
            if path.count("/") == 2 and path.startswith("src/") and path.endswith("/__init__.py")
        }
    )
    if len(found) != 1:
        sys.exit(f"src must hold one package, and holds {', '.join(found) or 'none'}.")
    return found[0]
