"""Further processes import beside the first one, and do nothing before it tells them to."""

import json
from pathlib import Path

from omegaconf import OmegaConf

from harness.strategies.launchable import num_further
from harness.testing import command

DDP = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "data=synthetic"]
# A network that notes when it is built.
NOTING = """
import os, time
from pathlib import Path
from small.models import MLP

class Net(MLP):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        rank = os.environ.get("LOCAL_RANK", "0")
        Path(os.environ["NOTES"], rank).write_text(repr(os.environ.get("MASTER_PORT")))
"""


def test_early_processes_are_the_run(tmp_path: Path) -> None:
    (tmp_path / "noting.py").write_text(NOTING)
    noting = {"PYTHONPATH": str(tmp_path), "NOTES": str(tmp_path)}
    words = [*DDP, "model=mlp", "model.net._target_=noting.Net", "trainer.max_epochs=1"]
    result = command("train.py", *words, f"output_dir={tmp_path / 'out'}", environment=noting)
    assert result.returncode == 0, result.stderr
    # Lightning gives the port to those that it starts; one that it had started itself would have
    # been built with it as well, so the processes that were started are counted.
    assert json.loads((tmp_path / "1").read_text().replace("'", '"')).isdigit()
    (record,) = (tmp_path / "out").glob("default/*/record.json")
    assert json.loads(record.read_text())["starts"][0]["num_processes"] == 2


def test_as_many_are_started_as_lightning_would_start() -> None:
    for words, number in (
        ({"strategy": "ddp", "devices": 3}, 2),
        ({"strategy": "ddp", "devices": [0, 1], "num_nodes": 2}, 1),
        ({"strategy": "ddp", "devices": 1}, 0),
        ({"strategy": {"_target_": "x.DDP2Strategy"}, "devices": 2, "num_nodes": 2}, 0),
        ({"strategy": {"_target_": "x.DataParallelStrategy"}, "devices": 2}, 0),
        ({"strategy": "auto", "devices": 1}, 0),
    ):
        trainer = OmegaConf.create({"num_nodes": 1, "accelerator": "cpu"} | words)
        assert num_further(trainer) == number, words
