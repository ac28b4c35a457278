"""Every YAML file composes, every experiment can be built, and what trains by default trains.

All strategies at once: python scripts/prove.py experiment=synthetic
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from harness import train
from harness.data.facts import fill_in
from harness.testing import command
from harness.training.build import make
from harness.training.check_targets import check_targets

CONF = Path(__file__).parents[1] / "conf"
BRIEF = [f"trainer.limit_{split}_batches=2" for split in ("train", "val", "test")]
DEFAULTS = (CONF / "train.yaml").read_text()
# A plus adds a group that train.yaml does not choose from.
CHOICES = [
    f"{'' if f'- {file.parent.name}:' in DEFAULTS else '+'}{file.parent.name}={file.stem}"
    for file in sorted(CONF.glob("*/*.yaml"))
    if not file.stem.startswith("_")
]


def without_values(node: Any) -> Any:
    """Leave out what has no value yet, ``???``, and what is filled in from another place, ``${}``.

    A model that is composed alone stands beside the default data, which may not be its own.
    """
    if isinstance(node, dict):
        return {key: without_values(child) for key, child in node.items()}
    if isinstance(node, list):
        return [without_values(child) for child in node]
    return None if isinstance(node, str) and (node == "???" or "${" in node) else node


def test_every_choice_composes_and_every_experiment_builds_its_data_and_model(
    make_cfg: Callable[..., DictConfig],
) -> None:
    for choice in CHOICES:
        try:
            cfg = make_cfg(choice)
            check_targets(OmegaConf.create(without_values(OmegaConf.to_container(cfg))))
            if "experiment=" in choice:
                build(cfg)
        except Exception as error:
            # An extra that is not installed, or files of another machine.
            is_elsewhere = isinstance(error.__cause__ or error, OSError)
            if not (is_elsewhere or "pip install" in str(error)):
                raise AssertionError(f"{choice}: {error}") from error


def build(cfg: DictConfig) -> None:
    """Build an experiment, if it waits for no values of the command line."""
    if not (OmegaConf.missing_keys(cfg.data or {}) or OmegaConf.missing_keys(cfg.model)):
        data = None if cfg.data is None else make(cfg.data)  # or the module has its own loaders
        fill_in(cfg, data)
        make(cfg.model)


def test_a_run_trains_and_goes_on(make_cfg, tmp_path: Path) -> None:
    cfg = make_cfg()
    if OmegaConf.missing_keys(cfg.data) or OmegaConf.missing_keys(cfg.model):
        pytest.skip("some of its values are for the command line")
    brief = [*BRIEF, "strategy=cpu", f"output_dir={tmp_path}"]
    train(*brief, "trainer.max_epochs=1")  # here, where all is imported
    further = command("train.py", *brief, "trainer.max_epochs=2", "resume=auto")
    assert further.returncode == 0, further.stderr
    (run,) = tmp_path.glob("*/*/")  # the second command has continued the first one's run
    assert (run / "results.json").exists()
    assert "epoch" in (run / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.slow  # a minute: pytest -m slow tests/test_config.py
def test_synthetic_is_the_same_on_two_devices() -> None:
    """A test like this for each experiment that is to stay so; all strategies take two minutes."""
    proof = command("scripts/prove.py", "experiment=synthetic", "--strategies", "ddp(2)")
    assert proof.returncode == 0, proof.stdout
