"""Every YAML file composes and names what exists; an experiment's model and data can be built."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.data.facts import fill_in
from harness.errors import UserError
from harness.run.making import make
from harness.run.targets import check_targets

CONF = Path(__file__).parents[1] / "conf"
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


@pytest.mark.parametrize("choice", CHOICES)
def test_choice_composes_and_names_what_exists(choice: str, make_cfg) -> None:
    cfg = make_cfg(choice)
    try:
        check_targets(OmegaConf.create(without_values(OmegaConf.to_container(cfg))))
    except UserError as error:
        if "pip install" in str(error):
            pytest.skip(str(error))  # an extra that is not installed
        raise


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if "experiment=" in choice])
def test_experiment_builds_its_data_and_its_model(choice: str, make_cfg) -> None:
    cfg = make_cfg(choice)
    if OmegaConf.missing_keys(cfg.data or {}) or OmegaConf.missing_keys(cfg.model):
        pytest.skip("some of its values are for the command line")
    try:
        data = None if cfg.data is None else make(cfg.data)  # or the module has its own loaders
        fill_in(cfg, data)
        make(cfg.model)
    except Exception as error:
        if isinstance(error.__cause__ or error, OSError):
            pytest.skip(f"it reads what this machine does not have: {error}")
        raise
