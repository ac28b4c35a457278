"""What of the code counts, and that it is kept whole."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness import code_version
from harness.code_version import CodeVersion

SOURCE = b'''
"""Of the file."""
import math


class Net:
    """Of the class."""

    def forward(self, x):
        """Of the method."""
        return math.tanh(x)
'''
THE_SAME = {
    "comments": SOURCE.replace(b"return", b"# Why.\n        return"),
    "docstrings": SOURCE.replace(b'"""Of the method."""', b'"""Of the method, and more."""'),
    "no docstring": SOURCE.replace(b'        """Of the method."""\n', b""),
    "formatting": SOURCE.replace(b"math.tanh(x)", b"(\n            math.tanh(x,)\n        )"),
}
ANOTHER = {
    "activation": SOURCE.replace(b"tanh", b"sin"),
    "default": SOURCE.replace(b"self, x", b"self, x=0"),
    "text that is no docstring": SOURCE.replace(b"math.tanh(x)", b'"tanh"'),
    "does not parse": SOURCE.replace(b"class Net:", b"class Net"),
}


def version(source: bytes = SOURCE, name: str = "study/net.py", **versions: str) -> CodeVersion:
    return CodeVersion({name: source}, versions)


@pytest.mark.parametrize("name", THE_SAME)
def test_what_is_only_written_differently_does_not_count(name: str) -> None:
    assert code_version.differences(version(), version(THE_SAME[name])) == []


@pytest.mark.parametrize("name", ANOTHER)
def test_what_does_something_else_counts(name: str) -> None:
    assert code_version.differences(version(), version(ANOTHER[name])) == ["study/net.py"]


def test_packages_count_by_their_version_and_not_by_their_build() -> None:
    before = version(torch="2.12.1+cu128", Python="3.11.7", gone="1.0")
    now = version(torch="2.13.0", Python="3.11.7", new="1.0")
    assert code_version.differences(before, now) == ["torch 2.12.1+cu128 -> 2.13.0"]
    assert code_version.differences(version(torch="2.13.0+cpu"), now) == []


def test_many_files_of_the_harness_are_one_difference() -> None:
    before = CodeVersion({f"harness/{name}.py": b"a = 1" for name in "abc"}, {})
    now = CodeVersion(dict.fromkeys(before.sources, b"a = 2"), {})
    assert code_version.differences(before, now) == ["harness (3 files)"]


def test_kept_code_is_read_again(tmp_path: Path) -> None:
    found = code_version.running(["torch.optim.AdamW"])
    found.save(tmp_path / "one.zip")
    assert code_version.load(tmp_path / "one.zip") == found
    found.save(tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_damaged_file_is_never_taken_for_whole(tmp_path: Path) -> None:
    expected = version(SOURCE, torch="2.13.0")
    path = tmp_path / "code.zip"
    expected.save(path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        found = code_version.load(path)
        # Names and times have no checksum; a file of another name is not compared.
        assert found is None or set(found.sources.values()) <= set(expected.sources.values())
    assert code_version.load(tmp_path / "nowhere.zip") is None


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of an owner, imported; and one in a folder of libraries."""
    for folder in (tmp_path / "study_of_code", tmp_path / "site-packages" / "library_of_code"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("__version__ = '1.2'\n")
        (folder / "net.py").write_text("from library_of_code import __doc__ as d, net\n")
    (tmp_path / "site-packages" / "library_of_code" / "net.py").write_text("def f(): pass\n")
    (tmp_path / "beside_of_code.py").write_text("WIDTH = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    __import__("study_of_code.net")
    __import__("beside_of_code")
    yield tmp_path
    for name in [name for name in sys.modules if "of_code" in name]:
        del sys.modules[name]


def test_owners_modules_and_the_harness_count_and_libraries_by_their_version(study: Path) -> None:
    found = code_version.running(["library_of_code.net.f"])
    ours = {name for name in found.sources if "of_code" in name}
    assert ours == {"study_of_code/__init__.py", "study_of_code/net.py", "beside_of_code.py"}
    assert "harness/code_version.py" in found.sources
    assert not [name for name in found.sources if name.startswith(("torch", "pytest"))]
    assert found.versions["library_of_code"] == "1.2"
    assert "study_of_code" not in found.versions
    assert found.versions["torch"].startswith("2.")


def test_what_was_imported_is_not_read_again(study: Path) -> None:
    """An owner may edit it while the run trains."""
    before = code_version.running([])
    (study / "study_of_code" / "net.py").write_text("WIDTH = 2\n")
    assert code_version.running([], before) == before


def test_file_that_has_gone_is_told(study: Path) -> None:
    before = code_version.running([])
    del sys.modules["study_of_code.net"]
    assert code_version.differences(before, code_version.running([])) == []  # not imported
    (study / "study_of_code" / "net.py").unlink()
    assert code_version.differences(before, code_version.running([])) == [
        "study_of_code/net.py (gone)"
    ]


@pytest.mark.parametrize("kind", ["branch", "packed", "detached", "worktree", "none"])
def test_commit_is_read_without_git(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    expected, here = None, tmp_path / "notebooks"
    here.mkdir()
    if kind != "none":
        git("init", "-b", "work/mine")
        git("commit", "--allow-empty", "-m", "first")
        expected = git("rev-parse", "HEAD")
    if kind == "packed":
        git("pack-refs", "--all")
    if kind == "detached":
        git("checkout", "--detach")
    if kind == "worktree":
        git("worktree", "add", "-b", "other", "elsewhere")
        here = tmp_path / "elsewhere"
    monkeypatch.chdir(here)
    assert code_version.running([]).commit == expected
