"""What a command says that is refused, asked in this process: nothing of it needs torch."""

from pathlib import Path

import pytest

from harness.command import main
from tests.conftest import ROOT


def refusal(*words: str, task: str = "train", conf: Path = ROOT / "conf") -> str:
    """The message with which a command ends."""
    with pytest.raises(SystemExit) as stop:
        main.main(task, conf, [*words])
    return str(stop.value.code)
