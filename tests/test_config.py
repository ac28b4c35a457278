"""Every YAML file composes, and every object that it names can be built."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness import compose
from harness.run import tasks as run

CONF = Path(__file__).parents[1] / "conf"
GROUPS = {path.name for path in CONF.iterdir() if path.is_dir()}

CHOICES = [
    f"{group}={file.stem}"
    for group in sorted(GROUPS)
    for file in sorted((CONF / group).glob("*.yaml"))
    if not file.stem.startswith("_")
]


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_builds(choice: str, make_cfg, monkeypatch: pytest.MonkeyPatch) -> None:
    if choice == "strategy=gpu":
        cfg = make_cfg(choice)
        assert cfg.trainer.accelerator == "gpu"
        cfg.trainer.accelerator = "cpu"  # only the name of the device differs
    else:
        cfg = make_cfg(choice)
    trainer, model, data = run.build(cfg)
    assert trainer.max_epochs is not None
    assert next(iter(model.parameters())).requires_grad
    assert len(data.dataset("train")) > 0


@pytest.mark.parametrize("file", sorted(CONF.rglob("*.yaml")), ids=lambda f: f.stem)
def test_file_opens_with_its_purpose(file: Path) -> None:
    lines = file.read_text().splitlines()
    comments = [line for line in lines[:3] if line.startswith("# ") and "@package" not in line]
    assert comments, f"{file} needs a first line that says what it is for"


@pytest.mark.parametrize("file", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda f: f.stem)
def test_experiment_states_its_command_duration_and_result(file: Path) -> None:
    header = "".join(line for line in file.read_text().splitlines(True) if line.startswith("#"))
    assert f"python train.py experiment={file.stem}" in header
    if "Not measured yet" in header:
        return  # scripts/new.py has just made it
    assert re.search(r"\d+ (s|min)\b", header), "how long it takes"
    assert re.search(r"0\.\d{2}", header), "which metric it reaches"


def test_command_line_wins_over_experiment() -> None:
    cfg = compose("train", ["experiment=synthetic", "model=cnn", "trainer.max_epochs=3"])
    assert cfg.model.net._target_.endswith("CNN")
    assert cfg.trainer.max_epochs == 3


def test_config_freezes_to_plain_values() -> None:
    frozen = OmegaConf.to_container(compose("train", ["strategy=ddp"]), resolve=True)
    assert "${" not in str(frozen)
