"""What data teaches before training: sizes that a model needs, scales, names of classes.

A setting ``from_data.num_classes`` takes the fact of that name, or the data module's attribute. A
training writes its facts into its folder, as ``data.json``; whoever goes on with the run, or uses
its checkpoints, gets them from there.
"""

import json
import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from harness import frozen_files
from harness.data.datamodule import DataModule
from harness.errors import UserError

FILE = "data.json"
OF_SPLIT = ("split_seed", "val_fraction", "test_fraction", "fold", "num_folds")
log = logging.getLogger(__name__)
TAKEN = "from_data."


def hand_over(data: Any, run_dir: Path) -> None:
    """Give a data module what the training of a run has learnt."""
    if isinstance(data, DataModule) and (run_dir / FILE).is_file():
        data.facts = known(run_dir)


def tell_other_split(cfg: DictConfig, trained: Any) -> None:
    """Warn where an evaluation splits its data otherwise than the training did.

    Args:
        cfg: of the evaluation.
        trained: the config of the run.
    """
    for name in OF_SPLIT:
        before, now = (OmegaConf.select(node, f"data.{name}") for node in (trained, cfg))
        if before != now:
            log.warning(
                "data.%s=%s is another split than that of the training, %s: the test may be on "
                "samples that were trained on.",
                name,
                now,
                before,
            )


def known(run_dir: Path) -> dict[str, Any]:
    """The facts of a run; empty where it has none.

    Raises:
        UserError: if they were damaged or edited.
    """
    try:
        found: dict[str, Any] = json.loads(frozen_files.read_json(run_dir / FILE))
    except FileNotFoundError:
        return {}
    return found


def fill_in(cfg: DictConfig, data: Any, run_dir: Path | None = None) -> dict[str, Any]:
    """Fill in what a config takes from the data, in place.

    Args:
        cfg: a resolved config of a command.
        data: the data module, or ``None``.
        run_dir: of the training, whose facts count where the data module knows none.

    Returns:
        What is to be kept with the run.

    Raises:
        UserError: if the data does not have what is asked for.
    """
    facts = dict(data.facts) if isinstance(data, DataModule) else known(run_dir) if run_dir else {}

    def fill(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {name: fill(child, f"{place}.{name}") for name, child in value.items()}
        if isinstance(value, list):
            return [fill(child, f"{place}[{i}]") for i, child in enumerate(value)]
        if not (isinstance(value, str) and value.startswith(TAKEN)):
            return value
        name = value.removeprefix(TAKEN)
        found: Any = facts[name] if name in facts else getattr(data, name, None)
        found = found.tolist() if hasattr(found, "tolist") else found  # of NumPy or torch
        if found is None:
            kind = "There is no data module" if data is None else f"{type(data).__name__} has none"
            raise UserError(f"{place}={value}: {kind}. Set it: {place}=<value>.")
        facts[name] = found
        return found

    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    for key in ("model", "callbacks"):
        if plain.get(key) is not None:
            cfg[key] = fill(plain[key], key)
    return facts
