"""The YAML files of the page for lightning-hydra-template compose, and keep the old settings."""

import re
import shutil
from pathlib import Path

import pytest

from harness.command.check import check
from harness.command.compose import compose_command
from tests.conftest import LIBRARY, ROOT

PAGE = LIBRARY / "docs" / "migrate_lightning_hydra_template.md"


def test_yaml_files_of_the_page_keep_early_stopping_the_objective_and_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    for name, text in zip(
        ("experiment/stars", "experiment/stars_search", "sweep/stars_optuna"), blocks, strict=True
    ):
        path = tmp_path / "conf" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for group, choice in (("data", "synthetic"), ("model", "mlp")):
        (tmp_path / "conf" / group / "stars.yaml").write_text(f"defaults: [{choice}]\n")
    for overrides in (
        ["experiment=stars"],
        ["experiment=stars_search"],
        ["experiment=stars", "sweep=stars_optuna"],
    ):
        command = compose_command("train", overrides)
        command.is_sweep = len(command.sweep.get("params") or {}) > 0
        check(command)
        stopper = command.cfg.callbacks.early_stopping
        assert (stopper.monitor, stopper.mode, stopper.patience) == ("val/mae", "min", 100)
        assert command.cfg.trainer.min_epochs == 100
        assert command.cfg.trainer.accelerator == "cpu"
        assert command.is_sweep == (overrides != ["experiment=stars"])
