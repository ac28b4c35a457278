"""Every choice of the library's config groups builds a Trainer; priorities in a composition."""

from collections.abc import Callable
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from harness.command import config_files
from harness.command.compose import TRACKERS
from harness.training import build as run
from tests.conftest import ROOT

GROUPS = ("callbacks", "debug", "gpus", "logger", "strategy", "trainer", "watch")
CHOICES = {group: config_files.choices(ROOT / "conf", group) for group in GROUPS}


def test_every_choice_builds(make_cfg: Callable[..., DictConfig]) -> None:
    """One choice of each group at a time; groups together, because their keys differ."""
    choices = {
        group: [name for name in names if name not in TRACKERS or find_spec(name)]
        for group, names in CHOICES.items()
    }
    for number in range(max(map(len, choices.values()))):
        words = [
            f"{group}={names[number % len(names)]}" for group, names in choices.items() if names
        ]
        words = [word for word in words if word != "gpus=emptiest"]  # not on a CPU
        cfg = make_cfg("model=mlp", "data=synthetic", *words)
        cfg.trainer.accelerator = "cpu"  # of strategy=gpu only the device differs
        trainer, model, data = run.build(cfg)
        assert trainer.max_epochs is not None, words
        assert next(iter(model.parameters())).requires_grad
        assert len(data.dataset("train")) > 0


def test_command_line_wins_over_experiment(make_cfg: Callable[..., DictConfig]) -> None:
    cfg = make_cfg("experiment=synthetic", "model=cnn", "trainer.max_epochs=3")
    assert cfg.model.net._target_.endswith("CNN")
    assert cfg.trainer.max_epochs == 3
    assert "${" not in str(OmegaConf.to_container(cfg, resolve=True))
