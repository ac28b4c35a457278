"""Further processes import beside the first one, and do nothing before it tells them to."""

import json
from pathlib import Path

from harness.testing import command

DDP = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "data=synthetic"]


def test_early_processes_are_the_run(tmp_path: Path) -> None:
    words = [*DDP, "model=mlp", "model.net._target_=tests.workers.noting.Noting"]
    words += ["trainer.max_epochs=1", f"output_dir={tmp_path / 'out'}"]
    result = command("train.py", *words, environment={"NOTES": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    # Lightning gives the port to those that it starts; one that it had started itself would have
    # been built with it as well, so the processes that were started are counted.
    assert json.loads((tmp_path / "1.json").read_text())["MASTER_PORT"].isdigit()
    (record,) = (tmp_path / "out").glob("default/*/record.json")
    assert json.loads(record.read_text())["starts"][0]["num_processes"] == 2
