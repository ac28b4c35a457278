"""Return the message of a refused command, which runs in this process without torch."""

from pathlib import Path

import pytest

from harness.command import main
from tests.conftest import ROOT


def refusal(*words: str, task: str = "train", conf: Path = ROOT / "conf") -> str:
    """Return the message with which a command ends."""
    with pytest.raises(SystemExit) as stop:
        main.main(task, conf, [*words])
    return str(stop.value.code)
