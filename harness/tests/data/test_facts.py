"""Facts of the data set reach the model, and later commands that use the run."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from harness import UserError, evaluate, load_run, train
from harness.data import facts
from tests.conftest import ROOT

CONF = ROOT / "conf"
BRIEF = ["experiment=synthetic", "strategy=cpu", "trainer.max_epochs=1", "data.num_classes=7"]


def test_model_takes_its_size_from_the_data_and_later_use_from_the_training(
    tmp_path: Path,
) -> None:
    run = train(*BRIEF, f"output_dir={tmp_path}", conf=CONF)
    assert facts.read_facts(run.folder) == {"num_classes": 7, "in_features": 64}
    assert run.model(torch.rand(2, 1, 8, 8)).shape == (2, 7)
    assert evaluate(run.checkpoint, conf=CONF).results.keys() >= {"test/accuracy"}
    path = run.folder / "data.json"
    path.write_text(path.read_text().replace("7", "8"))
    with pytest.raises(UserError, match="damaged or edited"):
        _ = load_run(run.folder).model
    path.write_text('{"num_classes": 8, "in_features": 64}')  # as 0.3 wrote it
    with pytest.raises(UserError, match="does not fit the model"):
        _ = load_run(run.folder).model


@pytest.mark.parametrize("data", [None, object()])
def test_what_the_data_does_not_have_is_told(data: object) -> None:
    cfg = OmegaConf.create({"model": {"net": [{"width": "from_data.num_horses"}]}})
    with pytest.raises(
        UserError, match=r"model.net\[0\].width=from_data.num_horses, but .*Set a value"
    ):
        facts.fill_in(cfg, data)


def test_fact_that_is_no_plain_value_is_refused() -> None:
    cfg = OmegaConf.create({"model": {"tokenizer": "from_data.tokenizer"}})
    data = type("Data", (), {"tokenizer": object()})()
    with pytest.raises(
        UserError, match=r"from_data.tokenizer is of type object, .*\n.*tokenizer._targ"
    ):
        facts.fill_in(cfg, data)
