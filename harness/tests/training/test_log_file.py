"""Messages of packages on the screen and in run.log."""

import logging
from pathlib import Path

import pytest

from harness import targets
from harness.training import log_file


def test_information_of_the_owners_code_is_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_allowed_names", ("small",))
    log_file.start(tmp_path / "run.log", {"small", "timm"}, True)
    for name in ("small.data", "timm", "harness.training"):
        logging.getLogger(name).info("%s informs", name)
        logging.getLogger(name).warning("%s warns", name)
    assert capsys.readouterr().err.splitlines() == [
        "small.data informs",
        "WARNING: small.data warns",
        "WARNING: timm warns",
        "WARNING: harness.training warns",
    ]
    assert len((tmp_path / "run.log").read_text().splitlines()) == 6
