"""The code and the packages that a process computes with, kept in a file and compared.

The sources themselves are kept, not their hashes: any later version of Python can then tell what
has changed from what was only formatted or documented, and they can be taken back. No torch.
"""

import ast
import json
import os
import platform
import re
import sys
import sysconfig
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from io import BytesIO
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

from harness.files import write_durably
from harness.places import is_owners

ABOUT = "versions.json"  # in the file, beside the sources
ALWAYS = ("torch", "pytorch_lightning", "torchmetrics", "numpy")
LIBRARIES = re.compile(f"(?:site|dist)-packages|{re.escape(sysconfig.get_path('stdlib'))}")
HAVE_BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FASTEST = 1  # of zlib's levels: a tenth more bytes than its best, in half the time


@dataclass(frozen=True)
class CodeVersion:
    """What a result depends on, besides settings and data.

    Attributes:
        sources: of each imported module that the owner or the harness has written, by its place,
            such as ``my_package/models/cnn.py``; of a compiled one the hash.
        versions: of Python and of packages, by name.
        commit: checked out where the command was started, though the sources may differ from it.
    """

    sources: dict[str, bytes]
    versions: dict[str, str]
    commit: str | None = None

    def save(self, path: Path) -> None:
        """Write a zip; equal versions give equal bytes.

        Raises:
            OSError: the disk is full, or the system refuses to write.
        """
        about = json.dumps({"commit": self.commit, "versions": self.versions}, indent=2)
        buffer = BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for name, content in sorted({**self.sources, ABOUT: about.encode()}.items()):
                member = zipfile.ZipInfo(name)  # of 1980, whenever it is written
                member.external_attr = 0o644 << 16
                file.writestr(member, content, zipfile.ZIP_DEFLATED, FASTEST)
        write_durably(path, buffer.getvalue())


def load(path: Path) -> CodeVersion | None:
    """Read what ``CodeVersion.save`` has written; ``None`` if it is damaged."""
    try:
        with zipfile.ZipFile(path) as file:
            sources = {name: file.read(name) for name in file.namelist()}
        about = json.loads(sources.pop(ABOUT))
        return CodeVersion(sources, dict(about["versions"]), about["commit"])
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError, ValueError, RuntimeError):
        return None  # a RuntimeError is of flags that only damage can have set


def running(targets: Iterable[str], before: CodeVersion | None = None) -> CodeVersion:
    """What this process has imported.

    Args:
        targets: dotted names; the versions of their packages count, as do those of what the
            owner's modules import.
        before: found earlier in this process; what was read then may have been edited since.
    """
    modules = _modules()
    sources = {} if before is None else dict(before.sources)
    for name, module in modules.items():
        if name not in sources:
            with suppress(OSError):  # gone since
                content = Path(str(module.__file__)).read_bytes()
                is_source = name.endswith(".py")
                sources[name] = content if is_source else sha256(content).hexdigest().encode()
    owners = [module for name, module in modules.items() if not name.startswith("harness/")]
    used = {*ALWAYS, *targets, *(name for module in owners for name in _used(module))}
    packages = {name.partition(".")[0] for name in used}
    return CodeVersion(
        sources,
        installed_versions(packages - {name.partition("/")[0] for name in sources}),
        checked_out(),
    )


def differences(before: CodeVersion, now: CodeVersion) -> list[str]:
    """What has changed that counts, each in some words.

    Comments, docstrings and formatting do not count, nor does what was not imported both times,
    unless its file has gone.

    Args:
        before: of a run.
        now: of this process.
    """
    changed = []
    for name, source in sorted(before.sources.items()):
        today = now.sources.get(name)
        if today is None and (path := _path(name)):
            today = path.read_bytes() if path.is_file() else b""
            name += "" if path.is_file() else " (gone)"
        if today not in (None, source) and _meaning(today) != _meaning(source):
            changed.append(name)
    ours = [name for name in changed if name.startswith("harness/")]
    files = [name for name in changed if name not in ours]
    files += [f"harness ({len(ours)} files)" if len(ours) > 1 else ours[0]] if ours else []
    return files + [
        f"{name} {version} -> {now.versions[name]}"
        for name, version in before.versions.items()
        if name in now.versions and _public(now.versions[name]) != _public(version)
    ]


def _modules() -> dict[str, ModuleType]:
    """The modules that the owner or the harness has written, by the place of their file."""
    found = {}
    for key, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or LIBRARIES.search(file):
            continue  # said without asking the file system, as of thousands
        if key != "__mp_main__" and (key.partition(".")[0] == "harness" or is_owners(file)):
            stem, suffix = os.path.splitext(os.path.basename(file))
            place = stem if key == "__main__" else key.replace(".", "/")
            found[place + ("/__init__" if stem == "__init__" else "") + suffix] = module
    return found


def _path(name: str) -> Path | None:
    """Where the file of a module would be that was not imported, if its package was."""
    folders = list(getattr(sys.modules.get(name.partition("/")[0]), "__path__", ()))
    return Path(folders[0]).parent / name if folders and name.endswith(".py") else None


def _meaning(source: bytes) -> str | bytes:
    """What of a file counts: its syntax tree without docstrings, or all of it if it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the file's author may write
            tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, HAVE_BODIES) and ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
        return ast.dump(tree)
    except (SyntaxError, ValueError, RecursionError):
        return source


def _used(module: ModuleType) -> Iterable[str]:
    """The modules that a module has imported something from."""
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            yield value.__name__
        elif isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            yield str(value.__module__)


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of packages, by name."""
    found = {"Python": platform.python_version()}
    for name in sorted(set(packages) - sys.stdlib_module_names):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # installed by another name, or not at all
            if version := getattr(sys.modules.get(name), "__version__", None):
                found[name] = str(version)
    return found


def _public(version: str) -> str:
    """A version without what tells of its build alone, as "2.13.0+cpu"."""
    return version.partition("+")[0]


def checked_out() -> str | None:
    """What is checked out here; read without git, which may not be installed."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        git = folder / ".git"
        if not git.exists():
            continue
        with suppress(OSError, ValueError):
            if git.is_file():  # of a worktree or of a submodule
                git = folder / git.read_text().partition("gitdir: ")[2].strip()
            head = (git / "HEAD").read_text().strip()
            if not head.startswith("ref: "):
                return head
            branch = head.removeprefix("ref: ")
            if (git / "commondir").is_file():
                git = git / (git / "commondir").read_text().strip()
            if (git / branch).is_file():
                return (git / branch).read_text().strip()
            packed = (git / "packed-refs").read_text().split()
            return packed[packed.index(branch) - 1]
        return None
    return None
