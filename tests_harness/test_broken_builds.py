"""A torchvision that was built for another torch is named, however it is met."""

import gc
from pathlib import Path

import pytest

from harness import broken_builds
from harness.testing import command

REASON = "RuntimeError: operator torchvision::nms does not exist"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder for the path with what a build for another torch does as it is imported."""
    package, info = tmp_path / "torchvision", tmp_path / "torchvision-0.20.1.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("from torchvision import _meta\n")
    (package / "_meta.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.20.1\nRequires-Dist: torch==2.5.1\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "data=synthetic", "output_dir={}/runs"],
        ["scripts/tune.py", "lr", "data=synthetic"],
        ["-c", "import harness; harness.build_optimizers"],
    ],
    ids=lambda words: words[0],
)
def test_commands_name_it_in_two_lines(words: list[str], broken: Path) -> None:
    """It breaks inside of torchmetrics' import, which Lightning's begins with."""
    words = [word.format(broken) for word in words]
    result = command(*words, environment={"PYTHONPATH": f"src:{broken}"})
    assert result.returncode == 1
    first, second = result.stderr.splitlines()[-2:]
    assert "torchvision 0.20.1 was built for torch 2.5.1, and breaks with torch" in first
    assert REASON in first
    assert "Type pip uninstall torchvision" in second
    assert ("Traceback" in result.stderr) == (words[0] == "-c")  # a program of one's own
    assert not [*broken.glob("runs/*")]


@pytest.mark.parametrize(
    ("torch", "fitting"), [("2.13.0+cpu", "0.28.*"), ("2.6.0", "0.21.*"), ("2.9.1", "0.24.*")]
)
def test_the_fitting_release_is_named(
    torch: str, fitting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        broken_builds.metadata, "version", {"torchvision": "0.20.1", "torch": torch}.get
    )
    monkeypatch.setattr(broken_builds.metadata, "requires", lambda _: ["torch (>=2.5.1)"])
    what, remedy = broken_builds.blame("torchvision", REASON)
    assert "was built for torch 2.5.1" in what
    assert f"torchvision=={fitting}" in remedy


def test_same_version_of_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torchvision": "0.28.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(broken_builds.metadata, "version", versions.get)
    monkeypatch.setattr(broken_builds.metadata, "requires", lambda _: ["torch==2.13.0"])
    what, _ = broken_builds.blame("torchvision", REASON)
    assert "was built for another build of torch 2.13.0" in what


def test_errors_of_other_code_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_broken.py").write_text("raise RuntimeError('mine')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="mine"), broken_builds.explained_imports():
        __import__("mine_broken")


def test_a_healthy_start_imports_none_of_them() -> None:
    code = "import harness, sys; from harness.command import start; print('torch' in sys.modules)"
    result = command("-c", code)
    assert result.stdout.strip() == "False", result.stderr


@pytest.mark.parametrize("was_looking", [True, False])
def test_garbage_is_looked_for_as_before_the_imports(was_looking: bool) -> None:
    """Also after one that fails; and what an owner's program holds by then may still go."""
    was, num_frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        gc.enable() if was_looking else gc.disable()
        seen: list[bool] = []
        with pytest.raises(IndexError), broken_builds.explained_imports():
            seen.append(gc.isenabled()) or seen[1]
        assert seen == [False]
        assert gc.isenabled() == was_looking
    finally:
        gc.enable() if was else gc.disable()
    assert gc.get_freeze_count() == num_frozen


def test_nobody_looks_for_garbage_in_what_a_command_has_imported() -> None:
    said = "from harness import DataModule; import gc; print(gc.isenabled(), gc.get_freeze_count())"
    is_looking, num_frozen = command("-c", said).stdout.split()
    assert is_looking == "True"
    assert int(num_frozen) > 100_000
