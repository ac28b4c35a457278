"""Every choice that the harness brings builds a Trainer; what wins over what in a composition."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.command.compose import TRACKERS
from harness.run import tasks as run
from tests_harness.conftest import ROOT

CHOICES = [
    f"{group}={file.stem}"
    for group in ("callbacks", "debug", "gpus", "logger", "strategy", "trainer")
    for file in sorted(Path(ROOT, "conf", group).glob("*.yaml"))
]


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_builds(choice: str, make_cfg) -> None:
    tracker = choice.removeprefix("logger=")
    if tracker in TRACKERS and find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    cfg = make_cfg(choice)
    if choice == "strategy=gpu":
        assert cfg.trainer.accelerator == "gpu"
        cfg.trainer.accelerator = "cpu"  # only the name of the device differs
    trainer, model, data = run.build(cfg)
    assert trainer.max_epochs is not None
    assert next(iter(model.parameters())).requires_grad
    assert len(data.dataset("train")) > 0


def test_command_line_wins_over_experiment(make_cfg) -> None:
    cfg = make_cfg("experiment=synthetic", "model=cnn", "trainer.max_epochs=3")
    assert cfg.model.net._target_.endswith("CNN")
    assert cfg.trainer.max_epochs == 3


def test_config_freezes_to_plain_values(make_cfg) -> None:
    assert "${" not in str(OmegaConf.to_container(make_cfg("strategy=ddp"), resolve=True))
