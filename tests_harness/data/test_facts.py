"""What data teaches reaches the model, and whoever uses the run afterwards."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from harness import UserError, evaluate, load_run, train
from harness.data import facts
from tests_harness.conftest import ROOT

CONF = ROOT / "conf"
BRIEF = ["experiment=synthetic", "strategy=cpu", "trainer.max_epochs=1", "data.num_classes=7"]


@pytest.fixture
def run(tmp_path: Path):
    return train(*BRIEF, f"output_dir={tmp_path}", conf=CONF)


def test_model_takes_its_size_from_the_data(run) -> None:
    assert json.loads((run.folder / "data.json").read_text()) == {
        "num_classes": 7,
        "in_features": 64,
    }
    assert run.model(torch.rand(2, 1, 8, 8)).shape == (2, 7)
    assert evaluate(run.checkpoint, conf=CONF).results.keys() >= {"test/accuracy"}


def test_later_use_takes_what_the_training_has_learnt(run) -> None:
    """Without the data, and not from what is there today."""
    (run.folder / ".data.json.crc32").unlink()
    (run.folder / "data.json").write_text('{"num_classes": 8, "in_features": 64}')
    with pytest.raises(UserError, match="does not fit the model"):
        _ = load_run(run.folder).model


@pytest.mark.parametrize("data", [None, object()])
def test_what_the_data_does_not_have_is_told(data: object) -> None:
    cfg = OmegaConf.create({"model": {"net": [{"width": "from_data.num_horses"}]}})
    with pytest.raises(UserError, match=r"model.net\[0\].width=from_data.num_horses: .*Set it"):
        facts.fill_in(cfg, data)
