from importlib import metadata

import pytest

from harness.doctor import machine as this


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("2.13.0+cpu", ""),
        ("2.6.0", ""),
        ("2.14.0", "torch 2.14.0 is installed, and tested are >=2.6,<2.14"),
        ("2.14.0.dev20260101+cpu", "torch 2.14.0.dev20260101+cpu is installed"),
        ("2.5.1+cu121", "torch 2.5.1+cu121 is installed"),
        (None, "torch none is installed"),
    ],
)
def test_version_is_held_against_the_bounds(
    torch: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "torch" and torch is None:
            raise metadata.PackageNotFoundError
        return str(torch) if name == "torch" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    section = this.versions()
    assert f"torch {str(torch).lower()}" in section.text
    assert len(section.problems) == bool(said)
    for problem in section.problems:
        assert said in problem.what
        assert problem.remedy == 'Install it: pip install "torch>=2.6,<2.14"'
