"""A finished run, which tests of scripts/runs.py copy and change."""

from pathlib import Path

import pytest

from harness import train
from tests.conftest import ROOT

WORDS = ["experiment=synthetic", "strategy=cpu", "trainer.max_epochs=2", "data.num_train=128"]
WORDS += ["+callbacks.labels._target_=tests.watch.labels.Labels"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("outputs")
    return train(*WORDS, f"output_dir={output}", conf=ROOT / "conf").folder
